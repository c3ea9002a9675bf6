#!/bin/sh
# The tests of engines on a real Ray cluster (one node, no GPU), with the parser of the real wheel.
# Ray has an environment of its own, as an engine has; it sees the project's packages as well.
set -eu
cd "$(dirname "$0")/../../../.."
here=tests/stages/ppo/engines
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
rm -rf "$work/stand_in" && .venv/bin/python $here/stand_in/install.py "$work/stand_in"

port() { .venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
dashboard=$(port)
export OPENRLHF_WHEEL
PATH="$work/ray/bin:$PATH" PYTHONPATH="$work/stand_in" RAY_AUTH_MODE=disabled OMP_NUM_THREADS=1 \
    "$work/ray/bin/ray" start --head --block --num-gpus 0 --port "$(port)" --dashboard-host 127.0.0.1 --dashboard-port "$dashboard" \
    --dashboard-agent-listen-port "$(port)" --dashboard-agent-grpc-port "$(port)" \
    --disable-usage-stats > "$work/ray.log" 2>&1 &
head=$!
trap 'kill $head; wait $head || true' EXIT
until .venv/bin/python -c "import requests; requests.get('http://127.0.0.1:$dashboard/api/version').raise_for_status()" 2>/dev/null; do
    kill -0 $head || { cat "$work/ray.log" >&2; exit 1; }
    sleep 1
done
RAY_TEST_ADDRESS="http://127.0.0.1:$dashboard" .venv/bin/python -m pytest $here -n 0 "$@"
