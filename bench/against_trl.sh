#!/usr/bin/env bash
# Our PPO update against TRL 1.12.0's, on the same models and prompts, interleaved: `bench/against_trl.sh [ROUNDS]` after `make run`.
# Makes .rondo/trl, an environment with trl==1.12.0. Alone on the machine; on 2 cores one round takes about 12 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=${1:-5} results=.rondo/against_trl.jsonl trl=.rondo/trl/bin/python
if [ ! -x "$trl" ]; then
    .venv/bin/python -m venv .rondo/trl
    # the same torch and transformers; only TRL is another
    grep -E '^(torch|transformers|peft|datasets|accelerate|tokenizers|safetensors|numpy|pandas|pyarrow)==' requirements.lock > .rondo/trl.lock
    "$trl" -m pip install --quiet -r .rondo/trl.lock trl==1.12.0
fi
: > "$results"
ours() { echo "{\"setting\": \"$1\", \"told\": $(.venv/bin/python bench/ppo.py --updates 3 --set ppo.num_ppo_epochs=4 "${@:2}")}" | tr -d '\n' >> "$results"; echo >> "$results"; }
theirs() { echo "{\"setting\": \"trl $1\", \"told\": $("$trl" bench/trl_ppo.py "$1" 2>> .rondo/trl.log)}" >> "$results"; }
for _ in $(seq "$rounds"); do
    ours adapters
    ours full --set ppo.lora.r=0 --set ppo.critic_lora.r=0
    for setting in fp32 lora bf16; do theirs "$setting"; done
done
.venv/bin/python - "$results" <<'PY'
import json, sys
from statistics import median

told = [json.loads(line) for line in open(sys.argv[1])]
seconds, memory = {}, {}
for row in told:
    seconds.setdefault(row["setting"], []).extend(row["told"]["updates"])
    memory[row["setting"]] = max(memory.get(row["setting"], 0), row["told"]["peak_memory_mib"])
for setting, all_ in seconds.items():
    ratios = "  ".join(f"{median(all_) / median(seconds[ours]):.2f} x {ours}" for ours in ("adapters", "full"))
    print(f"{setting:10} median {median(all_):6.2f} s [{min(all_):.2f}, {max(all_):.2f}]  {memory[setting]} MiB  {ratios}")
PY
