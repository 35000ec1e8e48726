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

.PHONY: help demo test test-slow lint format bench instructions wheel clean

help: ## Print this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RELEASE) ## Replay a built-in chat workload twice, with one setting changed.
	@$(BIN)/neuron-sched replay
	@printf '\nNow the same requests with 32 slots instead of 96. See how long the first token takes:\n\n'
	@$(BIN)/neuron-sched replay --max-num-seqs 32

test: $(DEBUG) ## Run every test: Rust, doc tests, Python, README and docstring examples.
	if cargo nextest --version >/dev/null 2>&1; \
	then cargo nextest run --locked --workspace --exclude neuron-sched-python; \
	else cargo test --locked --workspace --exclude neuron-sched-python --all-targets; fi
	cargo test --locked --workspace --exclude neuron-sched-python --doc
	$(BIN)/pytest

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

bench: $(RELEASE) ## Measure: ratios against pure Python (gated), then instruction counts.
	$(BIN)/pytest benches --timeout 900
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

clean: ## Remove everything that was built, the virtual environment too.
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
