#!/bin/sh
# The tests of engines and of stages on real Ray clusters (nodes of this machine, no GPU), with the parser of OpenRLHF's real
# wheel. Ray has an environment of its own, as an engine has; it sees the project's packages as well.
set -eu
cd "$(dirname "$0")/.."
work=$PWD/.rondo/engines
mkdir -p "$work"
if [ ! -x "$work/ray/bin/ray" ]; then
    .venv/bin/python -m venv "$work/ray"
    "$work/ray/bin/pip" install --quiet 'ray[default]==2.55.0' # OpenRLHF's pin
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$(ls -d "$work"/ray/lib/python*/site-packages)/project.pth"
fi
version=$(.venv/bin/python -c 'from stages.lib.core.params.openrlhf import VERSION; print(VERSION)')
ls "$work"/openrlhf-"$version"-*.whl >/dev/null 2>&1 ||
    .venv/bin/pip download --quiet --no-deps --only-binary :all: --python-version 3.11 --dest "$work" "openrlhf==$version"
OPENRLHF_WHEEL=$(ls "$work"/openrlhf-"$version"-*.whl)
export OPENRLHF_WHEEL
RAY_TEST="$work/ray/bin" .venv/bin/python -m pytest tests/stages/lib/core/ray tests/stages/ppo/engines tests/stages/ppo/test_ray.py -n 0 "$@"
