#!/bin/sh
# The tests of stores for teams, on real servers: S3 by moto, PostgreSQL by Debian's packages; and the schemas of Kubernetes.
set -eu
cd "$(dirname "$0")/../.."
stores=$PWD/.rondo/stores
if ! command -v initdb >/dev/null; then
    PATH=$PATH:$(echo /usr/lib/postgresql/*/bin)
    export PATH
fi
command -v initdb >/dev/null || { echo "no PostgreSQL: install it, e.g. with apt-get install postgresql" >&2; exit 2; }
install() { .venv/bin/python -m pip --disable-pip-version-check --python "$1/bin/python" install --quiet $2; }
if [ ! -e "$stores/made" ]; then
    rm -rf "$stores"
    .venv/bin/python -m venv --without-pip "$stores/stores"
    .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$(ls -d "$stores"/stores/lib/python*/site-packages)/project.pth"
    install "$stores/stores" "$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["stores"])')"
    install "$stores/stores" 'kubernetes-validate==1.37.0'
    .venv/bin/python -m venv --without-pip "$stores/s3"
    install "$stores/s3" 'moto[server]==5.2.5'
    touch "$stores/made"
fi
RONDO_STORES=$stores .venv/bin/python -m pytest tests/stores -n 0 "$@"
