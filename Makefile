# Every target creates what it requires: the virtual environment .venv with the tools of constraints.txt, and the
# extension in the profile of the target. Only one build of the extension is installed at a time. Its stamp names the
# profile, and the stamp of the other profile is removed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/tools.stamp
DEBUG := $(VENV)/debug.stamp
RELEASE := $(VENV)/release.stamp
# Folders are included because their modification time changes when a file is removed.
SOURCES := Cargo.toml Cargo.lock rust/python/build.rs $(wildcard rust/*/Cargo.toml) \
	$(shell find rust/*/src -name '*.rs' -o -type d)
# cargo and maturin use the same interpreter, so that neither rebuilds pyo3 after the other.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

# vLLM has a separate environment outside the checkout. tests/vllm_env.sh creates it and prints the cost first.
VLLM := PYTHON=$(PYTHON) tests/vllm_env.sh
VLLM_TESTS := tests/vllm
TORCH_TESTS := $(wildcard tests/runner/test_*.py) tests/examples
# Other releases of vLLM: the tests run the schedulers without an engine or a server.
MATRIX := $(addprefix test-vllm-,0.24.0 0.26.0 0.28.0 0.30.0 0.33.0)

.PHONY: help demo test test-core test-torch test-vllm test-matrix $(MATRIX) releases test-full test-slow lint format bench \
	instructions wheel vllm-env clean

help: ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RELEASE) ## Replay a synthetic chat workload with 96 and with 32 batch slots.
	@$(BIN)/neuron-sched replay
	@printf '\nThe same requests with 32 batch slots instead of 96. Compare the time to the first token:\n\n'
	@$(BIN)/neuron-sched replay --max-num-seqs 32

test: vllm-env test-core test-torch test-vllm ## Run all tests except the slow ones, on one release of vLLM.

test-core: $(DEBUG) ## Run the tests without vLLM: Rust, doc tests, Python, examples of README, docs and docstrings.
	if cargo nextest --version >/dev/null 2>&1; \
	then cargo nextest run --locked --workspace --exclude neuron-sched-python; \
	else cargo test --locked --workspace --exclude neuron-sched-python --all-targets; fi
	cargo test --locked --workspace --exclude neuron-sched-python --doc
	$(BIN)/pytest

test-torch: $(DEBUG) ## Run the tests with torch, in the environment of vLLM: compiled models, examples.
	$(VLLM) python -m pytest $(TORCH_TESTS)

test-vllm: $(DEBUG) ## Run the tests with vLLM 0.32: schedulers, engine, server, a worker.
	$(VLLM) python -m pytest -m 'not slow_server' $(VLLM_TESTS)

test-matrix: $(DEBUG) vllm-env ## Run the tests of the schedulers on five other releases of vLLM, two at a time.
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target $(MATRIX)

$(MATRIX): test-vllm-%: $(DEBUG)
	HYPOTHESIS_PROFILE=matrix $(VLLM) --release $* python -m pytest -m 'not (engine or server or slow_server)' $(VLLM_TESTS)

releases: ## Print the releases of vLLM that `make test-matrix` covers.
	@echo $(MATRIX:test-vllm-%=%)

test-full: test test-matrix test-slow ## Run all tests: also the matrix, the data-parallel server and the slow profiles.
	$(VLLM) python -m pytest -m slow_server $(VLLM_TESTS)
	HYPOTHESIS_PROFILE=slow-vllm $(VLLM) python -m pytest -m hypothesis --timeout 0 $(VLLM_TESTS)

test-slow: $(DEBUG) ## Run each property test over 100,000 histories.
	PROPTEST_CASES=100000 cargo test --locked --profile checked -p neuron-sched-core
	HYPOTHESIS_PROFILE=slow $(BIN)/pytest -m hypothesis --timeout 0

lint: $(DEBUG) ## Check formats, lints, types, the stub against the built module, and the CI workflow.
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --document-private-items -p neuron-sched-core
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/python -m mypy.stubtest neuron_sched._native --allowlist .stubtest-allowlist
	$(BIN)/zizmor --offline --quiet --strict-collection .github
	if command -v actionlint >/dev/null; then actionlint; fi

format: $(TOOLS) ## Format Rust and Python, and apply the fixes of ruff.
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: vllm-env $(RELEASE) ## Measure ratios against pure Python, numpy and vLLM, and count instructions; fail if a gate is missed.
	$(BIN)/pytest benches --timeout 900
	$(VLLM) python -m pytest benches/test_vllm.py --timeout 900
	$(BIN)/python benches/instructions.py

instructions: $(TOOLS) ## Count the core's instructions; fail if over 3 % above the baseline, or if a decode step allocates.
	cargo test --locked --quiet --profile profiling -p neuron-sched-core --test allocations
	$(BIN)/python benches/instructions.py

# With -I, Python does not search the folder of the script: tests/trace would shadow `trace` of the standard library.
wheel: $(TOOLS) ## Build sdist and wheel, and run a smoke test of the wheel in an empty environment.
	rm -rf dist
	$(BIN)/maturin sdist --out dist
	CARGO_TARGET_DIR=$(CURDIR)/target PIP_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz
	$(PYTHON) -m venv --clear $(VENV)/wheel
	PIP_CONSTRAINT=constraints.txt $(VENV)/wheel/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../$(VENV)/wheel/bin/python -I -W error ../tests/smoke.py

vllm-env: ## Create the environment with vLLM, once for all checkouts: about 4 minutes, 6 GB.
	$(VLLM)

clean: ## Remove all build products and .venv, but not the shared environment with vLLM.
	rm -rf $(VENV) target dist python/neuron_sched/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

$(TOOLS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

# maturin installs the dependencies of the package with pip, which reads PIP_CONSTRAINT.
develop = VIRTUAL_ENV=$(CURDIR)/$(VENV) PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_QUIET=1 $(BIN)/maturin develop --locked --extras cli

$(DEBUG): $(TOOLS) $(SOURCES)
	rm -f $(RELEASE)
	$(develop)
	touch $@

$(RELEASE): $(TOOLS) $(SOURCES)
	rm -f $(DEBUG)
	$(develop) --release
	touch $@
