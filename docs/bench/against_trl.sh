#!/usr/bin/env bash
# Compares PPO updates of Rondo with those of TRL 1.12.0, on the same models and prompts.
#
# docs/bench/against_trl.sh [ROUNDS]    seconds and memory per update with 4 epochs, after `make run`
# docs/bench/against_trl.sh curve       judge score on held-out prompts against seconds of training, for
#                                  TRL, Rondo and Rondo's slow path, seeds 0 to 2; takes an hour
#
# The script creates .rondo/trl, a virtual environment with trl==1.12.0 on the same torch. The
# trainers alternate within a round, so that a slower machine slows all of them; on 2 cores a round
# takes about 10 minutes. Each side runs as its users run it: Rondo with the settings of glibc and
# oneDNN that the pipeline gives its stages, TRL without. `SETTINGS=both docs/bench/against_trl.sh` gives
# them to TRL too; `curve` always does.
set -euo pipefail
cd "$(dirname "$0")/../.."
trl_python=.rondo/trl/bin/python rondo_python=.venv/bin/python
print_settings='from flows.execution.dvc_stages import SETTINGS
for setting in SETTINGS.items(): print(*setting, sep="=")'
mapfile -t settings < <("$rondo_python" -c "$print_settings")
if [ ! -x "$trl_python" ]; then
    "$rondo_python" -m venv .rondo/trl
    shared='torch|transformers|peft|datasets|accelerate|tokenizers|safetensors|numpy|pandas|pyarrow'
    shared="$shared|scipy|pydantic|ruamel\.yaml|ruamel\.yaml\.clib|requests|vaderSentiment|openai|scikit-learn"
    grep -E "^($shared)==" requirements.lock > .rondo/trl.lock
    "$trl_python" -m pip install --quiet -r .rondo/trl.lock trl==1.12.0
fi
export PYTHONPATH=. # TRL's interpreter imports the project's code too
results=.rondo/against_trl_${1:-5}.jsonl
: > "$results"
trl_settings=()
rondo() { env "${settings[@]}" "$rondo_python" "$@"; }
trl() { env "${trl_settings[@]}" "$trl_python" docs/bench/trl_ppo.py "$@" 2>> .rondo/trl.log; }
# Appends the JSON on standard input to the results, with the name of its setting.
record() {
    echo "{\"setting\": \"$1\", \"told\": $(cat)}" | tr -d '\n' >> "$results"
    echo >> "$results"
}

if [ "${1:-}" = curve ]; then
    trl_settings=("${settings[@]}")
    for seed in 0 1 2; do
        rondo docs/bench/curve.py --set seed=$seed | record "adapters, seed $seed"
        rondo docs/bench/curve.py --set seed=$seed --set ppo.lora.top_layers=null \
            --set ppo.critic_lora.top_layers=null --set model.attn_implementation=eager \
            | record "adapters on all layers, padded, seed $seed"
        # a learning rate of 1e-5 learns more slowly
        trl autocast --updates 20 --epochs 3 --every 4 --learning-rate 3e-5 --seed $seed \
            | record "trl autocast, seed $seed"
    done
    exit
fi

[ "${SETTINGS:-}" != both ] || trl_settings=("${settings[@]}")
for _ in $(seq "${1:-5}"); do
    rondo docs/bench/ppo.py --updates 4 --set ppo.num_ppo_epochs=4 | record adapters
    rondo docs/bench/ppo.py --updates 3 --set ppo.num_ppo_epochs=4 --set ppo.lora.r=0 \
        --set ppo.critic_lora.r=0 | record full
    for setting in fp32 lora autocast; do trl $setting --updates 2 | record "trl $setting"; done
    trl bf16 | record "trl bf16"
done
"$rondo_python" - "$results" <<'PY'
import json
import sys
from statistics import median

seconds, memory, floor = {}, {}, {}
for row in map(json.loads, open(sys.argv[1])):
    setting, result = row["setting"], row["told"]
    seconds.setdefault(setting, []).append(median(result["updates"]))  # one number per round
    memory[setting] = max(memory.get(setting, 0), result["peak_memory_mib"])
    floor.setdefault(setting, []).append(result.get("floor_seconds"))
titles = ["setting", "seconds per update, median [min, max]", "peak memory, MiB"]
titles += ["times adapters", "times full", "times its floor"]
print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")


def ratio(times, others):
    """The median ratio of two settings, compared within each round."""
    return f"{median(a / b for a, b in zip(times, others)):.2f}"


for setting, times in seconds.items():
    cells = [setting, f"{median(times):.1f} [{min(times):.1f}, {max(times):.1f}]", memory[setting]]
    cells += [ratio(times, seconds[name]) for name in ("adapters", "full")]
    cells.append(ratio(times, floor[setting]) if floor[setting][0] else "")
    print(f"| {' | '.join(map(str, cells))} |")
PY
