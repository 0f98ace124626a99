# halfmoon: `make up` runs the whole system, `make test` passes the tests. Each sets up what it needs.
#
#   make up PORT=8001 ARGS="--prefill 2"     more options: .venv/bin/halfmoon up --help
#   make TORCH="torch==2.13.0" PYTHON=python3.12 …

PYTHON ?= python3
TORCH ?= torch==2.13.0
PORT ?= 8000
ARGS ?=
BIN := .venv/bin
export PYTHON TORCH

.PHONY: help up test check format bench docs setup setup-dev clean

help:            ## Say what there is
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

up: setup        ## Run the whole system on this machine: NATS, etcd, a real model, every service
	@exec $(BIN)/halfmoon up --port $(PORT) $(ARGS)

test: setup-dev  ## Pass the tests: real servers, real processes, the real small model
	$(BIN)/pytest $(ARGS)

check: setup-dev ## Lint, format, types, layers, and whether generated docs are up to date
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/docs.py --check

format: setup-dev ## Format the code, and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-dev ## Measure, side by side in one run; writes docs/benchmarks.md
	PYTHONPATH=tests $(BIN)/python -m benchmarks

docs: setup-dev  ## Write the generated pages of docs/ anew
	$(BIN)/python scripts/docs.py

setup:
	@scripts/setup.sh torch,embedded

setup-dev:
	@scripts/setup.sh torch,embedded,dev

clean:           ## Remove the virtual environment and caches; the data directory stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
