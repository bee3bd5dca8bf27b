# Every target prepares what it needs: a virtual environment in .venv with the pinned torch first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ECOSYSTEM := .venv-ecosystem
BENCH  := $(VENV)/.bench
# Tests start many processes, so two of them at a time are enough for any machine.
JOBS   ?= 2

.PHONY: help test unit demo lint format types bench bench-hop bench-cold bench-waiting bench-step bench-floor bench-threads bench-scaling bytecodes dry-run bench-rpc \
        bench-autograd bench-tensors bench-train bench-compile bench-tls bench-faults compile-report programs \
        fuzz sanitize strangers liars withstanding chaos soak conformance ecosystem slow clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

test: lint types unit  ## lint, types and all tests: what CI runs

unit: $(READY)  ## the tests alone; ARGS="tests/rpc -k name" chooses
	$(BIN)/pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 -m "not slow" $(ARGS)

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

bench: $(BENCH)  ## stock torch RPC, Ray, gRPC and telegrad: the table of docs/performance.md
	$(BIN)/python -m benchmarks $(ARGS)

bench-scaling: $(BENCH)  ## how costs grow with calls, workers, contexts, references, nodes
	$(BIN)/python -m benchmarks.scaling $(ARGS)

dry-run: $(READY)  ## a job of 10,000 simulated workers: what grows faster than they do
	$(BIN)/python -m benchmarks.many $(ARGS)

bench-tensors: $(READY)  ## large tensors by shared memory, gloo, TCP and TLS; several connections
	$(BIN)/python -m benchmarks.tensors --write
	$(BIN)/python -m benchmarks.streams --write
	$(BIN)/python -m benchmarks.lanes --write

bench-rpc: $(READY)  ## stock torch RPC and telegrad, interleaved
	$(BIN)/python -m benchmarks.rpc

bench-autograd: $(READY)  ## stock distributed autograd and telegrad, interleaved
	$(BIN)/python -m benchmarks.autograd

bench-hop: $(READY)  ## where the time of one hop goes, message by message
	$(BIN)/python -m benchmarks.hop --write

bench-threads: $(READY)  ## eight threads that call at once, stock and telegrad, on two cores and on one
	$(BIN)/python -m benchmarks.threads

bench-step: $(READY)  ## where the time of a training step with two remote parts goes
	$(BIN)/python -m benchmarks.step --write

bench-floor: $(READY)  ## what a step of training takes at least, by processes with a socket and nothing else
	$(BIN)/python -m benchmarks.floor --write $(ARGS)

bench-cold: $(READY)  ## what code costs that runs once in a step of training
	$(BIN)/python -m benchmarks.cold --write

bytecodes: $(READY)  ## how many instructions of Python a call, a hop and a step take; ARGS=--files, --functions
	$(BIN)/python -m benchmarks.bytecodes $(ARGS)

bench-waiting: $(READY)  ## what a step takes beyond one process if its module only waits
	$(BIN)/python -m benchmarks.waiting --write $(ARGS)

bench-train: $(READY)  ## a training step over remote parts, stock and telegrad interleaved
	$(BIN)/python -m benchmarks.train

bench-compile: $(READY)  ## a compiled step beside the eager one
	$(BIN)/python -m benchmarks.compile

compile-report: $(READY)  ## what compiles as one graph, by backend; ARGS=--write updates the docs
	$(BIN)/python -m benchmarks.compile_report $(ARGS)

fuzz: $(READY)  ## coverage-guided fuzzing of all that reads what others send; FUZZ_SECONDS=300
	test -e $(VENV)/.fuzz || { $(BIN)/pip install --quiet -r requirements-fuzz.txt && touch $(VENV)/.fuzz; }
	$(BIN)/python -m tests.fuzz --seconds $(or $(FUZZ_SECONDS),300) $(ARGS)

strangers: $(READY)  ## attack a running job without its key, and time its calls meanwhile
	$(BIN)/python -m tests.rpc.strangers $(ARGS)

withstanding: $(READY)  ## load, faults and bad inputs in one run beside stock: a table of docs/faults.md
	$(BIN)/python -m benchmarks.withstanding --write $(ARGS)

liars: $(READY)  ## members of a job that takes data only, who say anything but what they should
	$(BIN)/python -m tests.rpc.liars $(ARGS)

# Beside the tree and not in it: what is used elsewhere stays as it is.
SANITIZED := build/sanitized
sanitize: $(READY)  ## the compiled parts under AddressSanitizer and UBSan
	rm -rf $(SANITIZED)
	mkdir -p $(SANITIZED)
	cp -r src tests pyproject.toml $(SANITIZED)
	CXXFLAGS="-g -O1 -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover" \
	  $(BIN)/python hatch_build.py $(SANITIZED)
	cd $(SANITIZED) && ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONPATH=src:. \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	  ../../$(BIN)/pytest -q -p no:cacheprovider --timeout 900 tests/wire/test_quick.py tests/wire/test_quick_links.py \
	  tests/wire/test_quick_tensors.py tests/wire/test_codec_hostile.py tests/wire/test_link.py tests/autograd/test_compiled.py \
	  tests/autograd/test_crossing.py tests/autograd/test_local.py tests/autograd/test_leaves.py

bench-tls: $(READY)  ## calls over TCP in the clear and under TLS, interleaved
	$(BIN)/python -m benchmarks.tls $(ARGS)

programs: $(READY)  ## random programs against one process: simulated, with faults, over processes
	$(BIN)/python -m tests.autograd.programs --simulated --count 11000
	$(BIN)/python -m tests.autograd.programs --simulated --faults --count 11000
	$(BIN)/python -m tests.autograd.programs --processes --count 330
	$(BIN)/python -m tests.compile.programs --count 60

bench-faults: $(READY)  ## the same faults on stock torch RPC and on telegrad
	$(BIN)/python -m benchmarks.faults $(ARGS)

chaos: $(READY)  ## training under kills, stops, cuts and delays: right or a named error, nothing left
	$(BIN)/python -m tests.chaos $(ARGS)

soak: $(READY)  ## a million calls, 100,000 contexts, random faults: nothing grows
	$(BIN)/python -m tests.chaos.soak $(ARGS)

conformance: $(READY)  ## PyTorch's own RPC suites on telegrad; ARGS="--stock", "--repeat 3", "-k REGEX"
	$(BIN)/python -m tests.conformance $(ARGS)

ecosystem: $(READY) $(ECOSYSTEM)/.ready  ## packages that use torch RPC, on stock and on telegrad
	rm -rf build/wheel
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(ECOSYSTEM)/bin/pip install --quiet --no-deps --force-reinstall build/wheel/telegrad-*.whl
	$(ECOSYSTEM)/bin/python tests/ecosystem/__main__.py $(ARGS)

slow: $(READY)  ## the tests that are too long for make test
	$(BIN)/pytest -m slow $(ARGS)

clean:  ## remove the environment and every cache
	rm -rf $(VENV) $(ECOSYSTEM) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f src/telegrad/*/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml requirements-dev.txt hatch_build.py $(wildcard src/telegrad/*.h src/telegrad/*/*.cpp)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/pip install --quiet -r requirements-dev.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

$(ECOSYSTEM)/.ready: requirements-ecosystem.txt
	test -x $(ECOSYSTEM)/bin/python || $(PYTHON) -m venv $(ECOSYSTEM)
	$(ECOSYSTEM)/bin/pip install --quiet "$$(grep '^torch==' requirements-ecosystem.txt)"
	$(ECOSYSTEM)/bin/pip install --quiet -r requirements-ecosystem.txt
	touch $@

$(BENCH): $(READY) requirements-bench.txt
	$(BIN)/pip install --quiet -r requirements-bench.txt
	touch $@
