# Every target makes what it needs: its own virtual environment in .venv, with the tools of constraints.txt,
# and the extension in the profile that the target wants. One build is installed at a time, so a stamp
# names its profile and the other profile's stamp is removed.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TOOLS := $(VENV)/tools.stamp
DEBUG := $(VENV)/debug.stamp
RELEASE := $(VENV)/release.stamp
# Folders too: their time changes when a file goes.
SOURCES := Cargo.toml Cargo.lock rust/python/build.rs $(wildcard rust/*/Cargo.toml) \
	$(shell find rust/*/src -name '*.rs' -o -type d)
# cargo and maturin then agree on the interpreter, and do not rebuild pyo3 for each other.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

# vLLM has an environment of its own, outside the checkout: tests/vllm_env.sh. It says what the first call costs.
VLLM := PYTHON=$(PYTHON) tests/vllm_env.sh
VLLM_TESTS = $(wildcard tests/test_vllm_*.py)
TORCH_TESTS = $(wildcard tests/test_torch_*.py)
# Other releases, on which the tests drive the schedulers only.
MATRIX := $(addprefix test-vllm-,0.24.0 0.26.0 0.28.0 0.30.0 0.33.0)

.PHONY: help demo test test-core test-torch test-vllm test-matrix $(MATRIX) test-full test-slow lint format bench instructions \
	wheel vllm-env clean

help: ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RELEASE) ## Replay a built-in chat workload twice, with one setting changed.
	@$(BIN)/neuron-sched replay
	@printf '\nNow the same requests with 32 slots instead of 96. See how long the first token takes:\n\n'
	@$(BIN)/neuron-sched replay --max-num-seqs 32

test: vllm-env test-core test-torch test-vllm ## Run every test but the slow ones, on one release of vLLM.

test-core: $(DEBUG) ## Without vLLM: Rust, doc tests, Python, README and docstring examples.
	if cargo nextest --version >/dev/null 2>&1; \
	then cargo nextest run --locked --workspace --exclude neuron-sched-python; \
	else cargo test --locked --workspace --exclude neuron-sched-python --all-targets; fi
	cargo test --locked --workspace --exclude neuron-sched-python --doc
	$(BIN)/pytest

test-torch: $(DEBUG) ## The tests with torch, which is in the environment of vLLM: compiled models, the examples.
	$(VLLM) python -m pytest $(TORCH_TESTS)

test-vllm: $(DEBUG) ## The tests with vLLM 0.32: scheduler, engine, server.
	$(VLLM) python -m pytest -m 'not slow_server' $(VLLM_TESTS)

test-matrix: $(DEBUG) vllm-env ## The tests of the schedulers on the other supported releases of vLLM, two at a time.
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target $(MATRIX)

$(MATRIX): test-vllm-%: $(DEBUG)
	HYPOTHESIS_PROFILE=matrix $(VLLM) --release $* python -m pytest -m 'not (engine or server or slow_server)' $(VLLM_TESTS)

test-full: test test-matrix test-slow ## Everything: also the matrix, the data-parallel server, the slow profiles.
	$(VLLM) python -m pytest -m slow_server $(VLLM_TESTS)
	HYPOTHESIS_PROFILE=slow-vllm $(VLLM) python -m pytest -m hypothesis --timeout 0 $(VLLM_TESTS)

test-slow: $(DEBUG) ## Run the property tests over 100,000 histories each.
	PROPTEST_CASES=100000 cargo test --locked --profile checked -p neuron-sched-core
	HYPOTHESIS_PROFILE=slow $(BIN)/pytest -m hypothesis --timeout 0

lint: $(DEBUG) ## Check formats, lints, types, and the stub against the built module.
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --locked --no-deps --document-private-items -p neuron-sched-core
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	MYPYPATH=python $(BIN)/python -m mypy.stubtest neuron_sched._native --allowlist .stubtest-allowlist

format: $(TOOLS) ## Format Rust and Python, and mend what ruff can mend.
	cargo fmt --all
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: vllm-env $(RELEASE) ## Measure: ratios against pure Python and within vLLM (gated), then instruction counts.
	$(BIN)/pytest benches --timeout 900
	$(VLLM) python -m pytest benches/test_vllm.py --timeout 900
	$(BIN)/python benches/instructions.py

instructions: $(TOOLS) ## Count the core's instructions under callgrind; fail when 3 % above the baseline, or when decode allocates.
	cargo test --locked --quiet --profile profiling -p neuron-sched-core --test allocations
	$(BIN)/python benches/instructions.py

wheel: $(TOOLS) ## Build sdist and wheel, install the wheel in an empty environment, try it there.
	rm -rf dist
	$(BIN)/maturin sdist --out dist
	CARGO_TARGET_DIR=$(CURDIR)/target PIP_CONSTRAINT=constraints.txt \
		$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist dist/*.tar.gz
	$(PYTHON) -m venv --clear $(VENV)/wheel
	PIP_CONSTRAINT=constraints.txt $(VENV)/wheel/bin/python -m pip install --quiet dist/*.whl
	cd dist && ../$(VENV)/wheel/bin/python -W error ../tests/smoke.py

vllm-env: ## Make the environment with vLLM, which all checkouts share. Once: about 4 minutes, 6 GB.
	$(VLLM)

clean: ## Remove everything that was built here, the virtual environment too (not the shared one with vLLM).
	rm -rf $(VENV) target dist python/neuron_sched/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks

$(TOOLS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

# maturin installs the package's own dependencies with pip, which reads the constraint from its environment.
develop = VIRTUAL_ENV=$(CURDIR)/$(VENV) PIP_CONSTRAINT=$(CURDIR)/constraints.txt PIP_QUIET=1 $(BIN)/maturin develop --locked --extras cli

$(DEBUG): $(TOOLS) $(SOURCES)
	rm -f $(RELEASE)
	$(develop)
	touch $@

$(RELEASE): $(TOOLS) $(SOURCES)
	rm -f $(DEBUG)
	$(develop) --release
	touch $@
