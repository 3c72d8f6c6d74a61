# Everything a developer or a first-time user types. Needs Python 3.11 or newer with venv, make and git.
#   make train   set up, build the quick start's model and data, train on two ranks, ask three questions
#   make test    set up with the test extras, then lint, types, layers and tests
#   make soak    the same with the full counts
#   make lint    style, types and layers only; make format rewrites the style

PYTHON ?= python3
NPROC ?= 2
JOBS ?= 2
BIN := .venv/bin
QUICKSTART := examples/quickstart
RUN := ./output/quickstart

.PHONY: setup setup-test train test soak lint format
.DELETE_ON_ERROR:

setup: .venv/.installed

setup-test: .venv/.installed-test

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Shardyard needs Python 3.11 or newer, and '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo 'not there'). Name another:" \
	    "make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# torch first, alone: its wheel is the largest, so a download that fails is repeated without the rest
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[plot]'
	@touch $@

.venv/.installed-test: .venv/.installed tests/requirements-lm-eval.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[plot,test]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps trl
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target .venv/torchao torchao
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps --upgrade --target .venv/lm-eval \
	  -r tests/requirements-lm-eval.txt
	@touch $@

train: setup
	$(BIN)/python $(QUICKSTART)/make_assets.py
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc_per_node $(NPROC) train_fsdp2.py \
	  $(QUICKSTART)/tune_tiny_qwen3.yaml --training.output_dir $(RUN)
	$(BIN)/python $(QUICKSTART)/show.py $(RUN)

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports --no-logo

format: setup-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

soak: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --soak
