#!/usr/bin/env bash
# One PPO update of ours against TRL 1.12.0's, on the same models and prompts, 4 epochs: `bench/against_trl.sh [ROUNDS]` after `make run`.
# Makes .rondo/trl, an environment with trl==1.12.0 on the same torch. Interleaved; on 2 cores one round takes about 10 minutes. Each runs as
# its users run it: ours with the malloc settings that the pipeline gives its stages; `MALLOC=both bench/against_trl.sh` gives them to TRL too.
# `bench/against_trl.sh curve` instead: the judge on held-out prompts against seconds of training, for both (with those settings) and for our
# slow path, seeds 0 to 2: an hour.
set -euo pipefail
cd "$(dirname "$0")/.."
trl=.rondo/trl/bin/python ours=.venv/bin/python
malloc=GLIBC_TUNABLES=$("$ours" -c 'from flows.execution.dvc_stages import MALLOC; print(MALLOC)')
if [ ! -x "$trl" ]; then
    "$ours" -m venv .rondo/trl
    shared='torch|transformers|peft|datasets|accelerate|tokenizers|safetensors|numpy|pandas|pyarrow|scipy|pydantic|PyYAML|requests|vaderSentiment'
    grep -E "^($shared)==" requirements.lock > .rondo/trl.lock
    "$trl" -m pip install --quiet -r .rondo/trl.lock trl==1.12.0
fi
export PYTHONPATH=. # the project's code for TRL's interpreter too
results=.rondo/against_trl_${1:-5}.jsonl
: > "$results"
ours() { env "$malloc" "$ours" "$@"; }
trl() { env ${theirs:+"$theirs"} "$trl" bench/trl_ppo.py "$@" 2>> .rondo/trl.log; }
theirs=
told() { echo "{\"setting\": \"$1\", \"told\": $(cat)}" | tr -d '\n' >> "$results"; echo >> "$results"; }

if [ "${1:-}" = curve ]; then
    theirs=$malloc
    for seed in 0 1 2; do
        ours bench/curve.py --set seed=$seed | told "adapters, seed $seed"
        ours bench/curve.py --set seed=$seed --set ppo.lora.top_layers=null --set ppo.critic_lora.top_layers=null \
            --set model.attn_implementation=eager | told "adapters on all layers, padded, seed $seed"
        trl autocast --updates 20 --epochs 3 --every 4 --learning-rate 3e-5 --seed $seed | told "trl autocast, seed $seed" # 1e-5 learns more slowly
    done
    exit
fi

[ "${MALLOC:-}" != both ] || theirs=$malloc
for _ in $(seq "${1:-5}"); do
    ours bench/ppo.py --updates 4 --set ppo.num_ppo_epochs=4 | told adapters
    ours bench/ppo.py --updates 3 --set ppo.num_ppo_epochs=4 --set ppo.lora.r=0 --set ppo.critic_lora.r=0 | told full
    for setting in fp32 lora autocast; do trl $setting --updates 2 | told "trl $setting"; done
    trl bf16 | told "trl bf16"
done
"$ours" - "$results" <<'PY'
import json, sys
from statistics import median

seconds, memory, floor = {}, {}, {}
for row in map(json.loads, open(sys.argv[1])):
    setting, told = row["setting"], row["told"]
    seconds.setdefault(setting, []).append(median(told["updates"]))  # one number a round
    memory[setting] = max(memory.get(setting, 0), told["peak_memory_mib"])
    floor.setdefault(setting, []).append(told.get("floor_seconds"))
print("| setting | seconds an update, median [least, most] | peak memory, MiB | times adapters | times full | times its floor |\n|---|---|---|---|---|---|")
for setting, each in seconds.items():
    ratios = " | ".join(f"{median(a / b for a, b in zip(each, seconds[ours])):.2f}" for ours in ("adapters", "full"))  # within a round
    over = f"{median(a / b for a, b in zip(each, floor[setting])):.2f}" if floor[setting][0] else ""
    print(f"| {setting} | {median(each):.1f} [{min(each):.1f}, {max(each):.1f}] | {memory[setting]} | {ratios} | {over} |")
PY
