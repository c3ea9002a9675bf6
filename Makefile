# The project's commands. All of them make .venv first; `make setup` does only that.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
PRESET ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-faults mutants test-engines test-stores lint ui lock clean

help:
	@echo "make run [PRESET=smoke]  two rounds, prepare to replay     make ui    Prefect and MLflow in the browser"
	@echo "make test                the tests                         make lint  ruff and mypy"
	@echo "make setup               .venv alone                       make lock  requirements.lock anew"
	@echo "make test-engines        engines, Ray, vLLM                  make test-stores  S3 and PostgreSQL"
	@echo "make test-faults         kills, full disks, bad input      make mutants     changes of the code that tests must see"
	@echo "make clean               caches and tool files; no results, no .venv"

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { echo "Python 3.11, 3.12 or 3.13 is needed, got $(or $(PYTHON),none): install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the locked dependencies into .venv (once; some minutes) ..."
	@$(PIP) install --quiet --no-compile -r requirements.lock
	@# on all cores, which pip does not do; some packages ship files that no Python compiles
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true
	@$(PIP) install --quiet --no-deps -e .
	@touch $@

run: setup
	@$(BIN)/rondo run $(if $(PRESET),--preset $(PRESET)) $(ARGS)

test: setup
	$(BIN)/python -m pytest $(ARGS)

# a sample of all faults; `make test` tries some of them. One process more than cores, since some tests wait for servers
test-faults: setup
	RONDO_FAULTS=full $(BIN)/python -m pytest tests/faults --dist worksteal -n $$(($$(nproc) + 1)) $(ARGS)

# mutmut in an environment of its own, in .rondo/mutants
mutants: setup
	sh tests/mutants.sh $(ARGS)

# Ray and vLLM in environments of their own, in .rondo/engines (once; 3 GB)
test-engines: setup
	sh tests/on_engines.sh $(ARGS)

# moto's S3 and the extra `stores` in environments of their own, in .rondo/stores; PostgreSQL is Debian's
test-stores: setup
	sh tests/stores/run.sh $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

ui: setup
	@exec $(BIN)/rondo up

# The whole closure by exact version, from a clean environment. Neither +cpu nor NVIDIA's packages: pip takes the torch that is offered.
lock:
	$(PYTHON) -m venv .rondo/lock
	.rondo/lock/bin/python -m pip install --quiet '.[dev]'
	.rondo/lock/bin/python -m pip freeze --exclude rondo | sed 's/+cpu$$//' | grep -viE '^(nvidia|triton|cuda-)' > requirements.lock
	rm -rf .rondo/lock build rondo.egg-info

clean:
	rm -rf .pytest_cache .mypy_cache .ruff_cache mutants build *.egg-info
	find flows stages tests -name __pycache__ -type d -prune -exec rm -rf {} +
