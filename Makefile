# `make run` and `make test` are all a fresh machine needs: Python >= 3.11, and a C compiler for the fast
# CPU decode (without one, torch does the same arithmetic).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint check clean

run: $(STAMP)
	$(BIN)/densemla study

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/densemla/backends/cpu/native*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,dspark]'
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info src/densemla/backends/cpu/*.so
