# Targets: run, install, test, lint, docs, clean; constraints, licences, sbom, audit, dist. All but clean make .venv first, and again when what it is made from has changed.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --no-compile --quiet --quiet --disable-pip-version-check --no-input
# pip would compile one file after the other. Of the models of transformers a few are ever imported.
COMPILE := $(BIN)/python -m compileall -q -q -j 0 -x '/transformers/models/' $(VENV)/lib
CONFIG ?= configs/default.yaml
ARGS ?=

.PHONY: run install test lint docs clean constraints licences sbom audit dist
.DEFAULT_GOAL := run

run: $(VENV)/.installed
	@command -v gcc >/dev/null || { echo "error: gcc was not found. Install it, such as 'apt-get install gcc libc6-dev'" >&2; exit 3; }
	@$(BIN)/kbrl train --config $(CONFIG) $(ARGS)

install: $(VENV)/.installed

# Four workers on two cores: tests of whole runs, of deadlines and of what dies wait for a third of their time. They
# start hundreds of processes: without bytecode each would compile what it imports of ours.
test: export OMP_NUM_THREADS ?= 1
test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 4 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Reference pages from the code; a test says when they are out of date.
docs: $(VENV)/.installed
	$(BIN)/kbrl config --docs > docs/reference/config.md
	$(BIN)/kbrl config --metrics > docs/reference/metrics.md

# What the project is made of and made into: deploy/supply.py. The tools live apart, so that they are in no list of ours.
TOOLS := $(VENV)/tools
constraints licences: $(VENV)/.installed-dev
	$(BIN)/python deploy/supply.py $@

sbom: $(VENV)/.installed-dev $(TOOLS)/.installed
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o dist/sbom.cdx.json $(BIN)/python

# Fails where no advisory service can be reached; make audit AUDIT=--unreachable-ok says so and goes on.
audit: $(VENV)/.installed-dev $(TOOLS)/.installed
	$(BIN)/python deploy/supply.py audit $(TOOLS)/bin/pip-audit $(AUDIT)

dist: $(VENV)/.installed-dev
	$(BIN)/python deploy/supply.py dist dist

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
	@$(COMPILE) || true # files for other versions of Python don't compile
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints-cpu.txt | $(BIN)/python
	@echo "installing into $(VENV) with the tools for tests, about a minute …"
	@$(PIP) -c constraints-cpu.txt -e '.[dev]'
	@$(COMPILE) || true
	@touch $@ $(VENV)/.installed

$(TOOLS)/.installed: | $(BIN)/python
	@$(BIN)/python -m venv $(TOOLS)
	@$(TOOLS)/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-input cyclonedx-bom==7.5.0 pip-audit==2.10.1
	@touch $@
