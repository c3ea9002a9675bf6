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
. tests/environments.sh
if [ ! -e "$stores/made" ]; then
    rm -rf "$stores"
    new_environment "$stores/stores"
    see_project "$stores/stores"
    install "$stores/stores" $(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["stores"])')
    install "$stores/stores" 'kubernetes-validate==1.37.0'
    new_environment "$stores/s3"
    install "$stores/s3" 'moto[server]==5.2.5'
    touch "$stores/made"
fi
RONDO_STORES=$stores .venv/bin/python -m pytest tests/stores -n 0 "$@"
