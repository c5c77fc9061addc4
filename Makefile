PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-cuda wheel-test soak lint docs bench wheel release clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Create .venv and install everything (once: 2 minutes, with uv less)

# The stamp is touched last, so an interrupted installation is taken up again.
$(STAMP): setup.cfg pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) not found; name an interpreter: make setup PYTHON=python3.11" >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit( \
	  "error: Python >= 3.10 is needed, $(PYTHON) is %d.%d; " % sys.version_info[:2] + \
	  "name a newer one: make setup PYTHON=python3.11")'
	@if command -v uv >/dev/null; then \
	  echo "installing into $(VENV) with uv" && \
	  { test -x $(BIN)/pip || uv venv -q --seed --python $(PYTHON) $(VENV); } && \
	  uv pip install -q --python $(BIN)/python -e '.[dev]'; \
	else \
	  echo "installing into $(VENV), about 2 minutes" && \
	  { test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV); } && \
	  : "The pip that comes with Python 3.10.0 cannot install a setup.cfg project in place." && \
	  $(BIN)/python -m pip install -q --upgrade pip && \
	  $(BIN)/python -m pip install -q -e '.[dev]'; \
	fi
	@touch $@

demo: setup ## Train on real digits, elastically and in a fixed pipeline; results in runs/demo/
	$(BIN)/pipetransformer demo

test: setup ## Run the tests, without the slow ones
	@# Most tests keep one core busy, so that two go on side by side.
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadfile

test-all: setup ## Run all tests, with soak and fault tests and that of the wheel
	$(BIN)/python -m pytest -q

test-cuda: setup ## Run the tests that need a GPU; all others never use one
	$(BIN)/python -m pytest -q -m cuda

wheel-test: setup ## Install the wheel alone, and run the README's first program with it
	$(BIN)/python -m pytest -q tests/test_wheel.py

soak: setup ## Kill ranks of real runs at 200 random points; nothing may be lost
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.soak --kills 200

lint: setup ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup ## Build the documentation into site/; without a network, and strictly
	@# What mkdocs-material says of its own future is no fault of a page.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "to read and search it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

bench: setup ## Measure the Trainer beside a plain loop, and the engine beside its peers
	@$(BIN)/python -m pip install -q -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.benchmarks.rivals
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.benchmarks.engine

wheel: setup ## Build the wheel into dist/
	@# A leftover build/ would carry deleted modules into the wheel.
	rm -rf build
	$(BIN)/python -m build --wheel

release: lint test docs wheel wheel-test ## Prove all of it, build the wheel, install it elsewhere
	$(BIN)/python -m build --sdist

clean: ## Remove .venv, builds and caches; runs/ stays
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
