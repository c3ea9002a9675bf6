#!/usr/bin/env bash
# Measures what only a GPU can show, planned for ten minutes on an H100. There its first half was run
# (docs/performance.md); on a CPU it was run in the reduced mode.
#
#   bash docs/bench/gpu.sh                        on the GPU, with the preset's model and data from the hub
#   MODEL=/path DATA=/path bash docs/bench/gpu.sh   with folders or hub ids of your own
#   DEVICE=cpu SIZE=tiny bash docs/bench/gpu.sh   checks the script itself, on any machine
#
# Four parts: the stages of presets/qwen2.5-0.5b-hh.yaml from assets to replay, shortened; SFT,
# reward model and PPO against TRL's own trainers on the same batch; vLLM against Rondo's sampler;
# memory of each. docs/bench/gpu.py has the sizes. Without MODEL, DATA and hub it takes random weights in
# the shape of Qwen2.5-0.5B and made-up conversations, and its output tells so. TRL's PPO trainer
# (trl==1.12.0) needs .rondo/trl, which docs/bench/against_trl.sh makes; vLLM must be installed. What is
# missing is skipped, with a line that tells it.
#
# Results: .rondo/gpu/results.json and .rondo/gpu/results.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
device=${DEVICE:-cuda} size=${SIZE:-full}
python=${PYTHON:-.venv/bin/python}
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "docs/bench/gpu.sh: torch sees no GPU; set DEVICE=cpu SIZE=tiny to check the script alone" >&2
    exit 2
fi
[ "$device" = cuda ] || export CUDA_VISIBLE_DEVICES=
export HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD:$PWD/docs/bench"
rm -rf .rondo/gpu
mkdir -p .rondo/gpu
exec "$python" docs/bench/gpu.py --size "$size" ${MODEL:+--model "$MODEL"} ${DATA:+--data "$DATA"}
