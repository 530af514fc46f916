# Two commands do everything on a fresh machine with Python 3.11+, make and git:
#   make demo     a real agent, a real model, exact samples
#   make test     every test
# What is heavy (virtual environment, model, agents) lives in TURNLOOM_CACHE, never in the tree.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

export TURNLOOM_CACHE ?= $(HOME)/.cache/turnloom
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
AGENT ?= sdk-agent
N ?= 4
OUT ?= $(CURDIR)/runs/demo

# One environment per checkout and Python: an editable install belongs to its tree.
VENV := $(TURNLOOM_CACHE)/venvs/$(shell printf '%s %s' '$(CURDIR)' "$$($(PYTHON) --version 2>&1)" | cksum | cut -d' ' -f1)
BIN := $(VENV)/bin

.PHONY: help demo test lint venv clean

help:
	@echo "make demo [AGENT=sdk-agent|pi|claude-code] [N=4]   run a real agent on a small task and check the samples"
	@echo "make test                                          run every test"
	@echo "make lint                                          ruff, mypy --strict, import-linter"
	@echo "make venv                                          print the virtual environment's folder"
	@echo "make clean                                         remove this checkout's virtual environment and runs/"

demo: $(VENV)/.demo
	@$(BIN)/turnloom demo --agent $(AGENT) -n $(N) --out $(OUT)

# pytest's closing line is the last one printed.
test: $(VENV)/.test
	@$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

venv: $(VENV)/.demo
	@echo $(VENV)

clean:
	rm -rf $(VENV) runs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Turnloom needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "==> making a virtual environment in $(VENV)"
	@mkdir -p $(dir $(VENV))
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	@echo "==> installing turnloom with its agent and its embedded engine (about 660 MB in all, once)"
	@$(BIN)/pip install --quiet -e '.[agent,local]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "==> installing turnloom and what its tests need (about 700 MB in all, once)"
	@$(BIN)/pip install --quiet -e '.[test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	@echo "==> installing turnloom and its linters (once)"
	@$(BIN)/pip install --quiet -e '.[test,lint]'
	@touch $@ $(VENV)/.test $(VENV)/.demo
