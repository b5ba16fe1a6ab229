# Targets: run, test, lint, clean. All but clean make .venv first, and again when what it is made from has changed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-input
CONFIG ?= configs/default.yaml
ARGS ?=

.PHONY: run test lint clean
.DEFAULT_GOAL := run

run: $(VENV)/.installed
	@command -v gcc >/dev/null || { echo "error: gcc was not found. Install it, such as 'apt-get install gcc libc6-dev'" >&2; exit 3; }
	@$(BIN)/kbrl train --config $(CONFIG) $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist *.egg-info .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer was found. Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 3; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $(PYTHON) cannot make a virtual environment. Install venv, such as 'apt-get install python3-venv'" >&2; exit 3; }

$(VENV)/.installed: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing into $(VENV), about a minute …"
	@$(PIP) -c constraints-cpu.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing into $(VENV) with the tools for tests, about a minute …"
	@$(PIP) -c constraints-cpu.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed
