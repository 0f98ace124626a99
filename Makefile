# halfmoon: `make up` runs the whole system, `make test` passes the tests. Each sets up what it needs.
#
#   make up PORT=8001 ARGS="--prefill 2"     more options: .venv/bin/halfmoon up --help
#   make up ENGINE=vllm                      vLLM has an environment of its own: see docs/engines.md
#   make test JOBS=1                         tests one at a time; by default two share them
#   make test ARGS="-m nightly"              those that are too slow for every change
#   make TORCH="torch==2.13.0" PYTHON=python3.12 …

PYTHON ?= python3
TORCH ?= torch==2.13.0
ENGINE ?= torch
PORT ?= 8000
ARGS ?=
JOBS ?= 2
SOAK_S ?= 600
SEED ?= $(shell date +%s)
BIN := .venv/bin
export PYTHON TORCH

.PHONY: help up test test-rdma test-vllm soak fuzz check format bench results bench-vllm docs setup setup-dev clean

help:            ## Say what there is
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

ifeq ($(ENGINE),vllm)
up:              ## Run the whole system on this machine: NATS, etcd, a real model, every service
	@exec scripts/vllm.sh halfmoon up --engine vllm --port $(PORT) $(ARGS)
else
up: setup
	@exec $(BIN)/halfmoon up --engine $(ENGINE) --port $(PORT) $(ARGS)
endif

test: setup-dev  ## Pass the tests: real servers, real processes, the real small model
	-@PYTHONPATH=tests $(BIN)/python -m support.model
	$(BIN)/pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder -m "not nightly" --durations 20 $(ARGS)

test-vllm:       ## Pass the tests of the vLLM engine, in vLLM's own environment; fails where none could be run
	scripts/vllm.sh pytest -m vllm --require-vllm tests/engine_vllm tests/contract/test_engine_contract.py $(ARGS)

test-rdma: setup-dev ## Pass the tests of RDMA on Soft-RoCE, in virtual machines (Debian 12, root); fails where none could be run
	scripts/test_rdma.sh $(ARGS)

soak: setup-dev  ## Ten minutes of load while processes are killed or stand still; SOAK_S=… SEED=… to repeat a run
	HALFMOON_SOAK_S=$(SOAK_S) HALFMOON_SOAK_SEED=$(SEED) $(BIN)/pytest -s tests/e2e/test_e2e_soak.py -k random $(ARGS)

fuzz: setup-dev  ## Fuzz the framing of the tcp transport, 100,000 cases each way (an hour or so)
	HALFMOON_FUZZ_CASES=100000 $(BIN)/pytest --timeout=0 tests/wire/test_transport_fuzz.py $(ARGS)

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
	PYTHONPATH=tests $(BIN)/python -m benchmarks $(ARGS)

results: setup-dev ## Redo published experiments in the simulator; writes docs/results.md
	$(BIN)/python -m benchmarks.results $(ARGS)

bench-vllm:      ## Measure the vLLM engine and its connector, in vLLM's own environment; adds to docs/benchmarks.md
	PYTHONPATH=$(CURDIR):$(CURDIR)/tests scripts/vllm.sh python -m benchmarks.vllm

docs: setup-dev  ## Write the generated pages of docs/ anew
	$(BIN)/python scripts/docs.py

setup:
	@scripts/setup.sh torch,embedded

setup-dev:
	@scripts/setup.sh torch,embedded,dev

clean:           ## Remove the virtual environment and caches; the data directory stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
