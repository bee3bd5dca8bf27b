# Every target prepares what it needs: a virtual environment in .venv with the pinned torch first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Tests start many processes, so two of them at a time are enough for any machine.
JOBS   ?= 2

.PHONY: help test unit demo lint format types bench-rpc bench-autograd clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

test: lint types unit  ## lint, types and all tests: what CI runs

unit: $(READY)  ## the tests alone; ARGS="tests/rpc -k name" chooses
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

demo: $(READY)  ## train a model that is split over local workers
	$(BIN)/telegrad demo

lint: $(READY)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY)  ## mypy --strict on src
	$(BIN)/mypy

bench-rpc: $(READY)  ## stock torch RPC and telegrad, interleaved
	$(BIN)/python -m benchmarks.rpc

bench-autograd: $(READY)  ## stock distributed autograd and telegrad, interleaved
	$(BIN)/python -m benchmarks.autograd

clean:  ## remove the environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/pip install --quiet -r requirements-dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
