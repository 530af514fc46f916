# Two commands do everything on a fresh machine with Python 3.11+, make and git:
#   make demo     a real agent, a real model, exact samples
#   make test     every test
# What is heavy (virtual environment, model, agents) lives in TURNLOOM_CACHE, never in the tree.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:

# Empty is unset, as for turnloom itself; a relative folder is meant from here.
ifeq ($(strip $(value TURNLOOM_CACHE)),)
override TURNLOOM_CACHE := $(or $(filter /%,$(XDG_CACHE_HOME)),$(addsuffix /.cache,$(HOME)),$(error set TURNLOOM_CACHE: there is no HOME))/turnloom
endif

# make cuts a file's name at a space, and reads other characters as its own. No shell below ever sees such a name.
hash := \#
comma := ,
odd = $(or $(word 2,x$1x),$(strip $(foreach c,' " ` $$ \ $(hash) ; & | < > ( ) * ? [ ] { } ~ ! : % =,$(findstring $c,$1))))
ifneq ($(call odd,$(value CURDIR)),)
$(error this checkout's path holds a space, a quote or the like; move it to a plain one)
endif
ifneq ($(call odd,$(value TURNLOOM_CACHE)),)
$(error the cache's path holds a space, a quote or the like; set TURNLOOM_CACHE to a plain one)
endif
override TURNLOOM_CACHE := $(abspath $(TURNLOOM_CACHE))
export TURNLOOM_CACHE

export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PYTHON ?= python3
AGENT ?= sdk-agent
N ?= 4
OUT ?= $(CURDIR)/runs/demo
# The shell gets these as variables, so that any character may stand in them.
export PYTHON AGENT N OUT

# One environment per checkout and Python: an editable install belongs to its tree.
KEY := $(shell printf '%s %s' '$(CURDIR)' "$$('$(subst ','\'',$(PYTHON))' --version 2>&1)" | cksum | cut -d' ' -f1)
ifeq ($(KEY),)
$(error cksum and cut are needed to name the virtual environment)
endif
VENV := $(TURNLOOM_CACHE)/venvs/$(KEY)
BIN := $(VENV)/bin
# Says whose the folder is: written before anything else in it, and what `make clean` looks for.
OWNER := $(VENV)/.turnloom-checkout

# One line per package that comes over the network: the large ones take minutes.
define INSTALL
'$(BIN)/python' -m pip install --progress-bar off -e '.[$1]' \
	| awk '/^ *Downloading / && !/\.metadata / { sub(/^ */, "    "); print; fflush() } /^Installing collected/ { print "    installing"; fflush() }'
endef

.PHONY: help demo test agents engines bench laws mutants torture fuzz lint venv clean

help:
	@echo "make demo [AGENT=sdk-agent|pi|claude-code] [N=4]   run a real agent on a small task and check the samples"
	@echo "make test                                          run every test"
	@echo "make agents                                        every agent there is, installed and run on the gateway; writes docs/agents.md"
	@echo "make engines                                       real SGLang, its router, vLLM and llama.cpp, installed and run on the CPU; writes docs/engines.md"
	@echo "make bench                                         what a client sees of a slow engine's stream, in every dialect"
	@echo "make laws [SESSIONS=2000]                          every law on every chat template of the corpus; writes docs/exactness.md"
	@echo "make mutants [SAMPLE=100] [SEED=1]                 small errors put into core and render, one at a time; the tests must see 85 of 100"
	@echo "make torture [ROUNDS=300] [SEED=1]                 kill -9 under 16 sessions whose agents ask again, again and again"
	@echo "make fuzz [COUNT=100000] [SEED=1]                  odd requests to every reader and odd records to the store"
	@echo "make lint                                          ruff, mypy --strict, import-linter"
	@echo "make venv                                          print the virtual environment's folder"
	@echo "make clean                                         remove this checkout's virtual environment and runs/"

demo: $(VENV)/.demo
	@'$(BIN)/turnloom' demo --agent "$$AGENT" -n "$$N" --out "$$OUT"

# pytest's closing line is the last one printed.
test: $(VENV)/.test
	@'$(BIN)/python' -m pytest $(ARGS)

# Each agent is installed once into the cache, some hundreds of megabytes; that takes most of the time.
agents: $(VENV)/.test
	@'$(BIN)/python' -m pytest tests/agents $(ARGS)

# SGLang and vLLM are installed once into the cache, each in an environment of its own; that takes some minutes.
# Without SGLang nothing is proved, so its set-up must succeed; where vLLM's does not, its tests say so and are skipped.
engines: $(VENV)/.test
	@'$(BIN)/python' -m tests.engines.setup sglang
	@'$(BIN)/python' -m tests.engines.setup vllm || echo "==> vLLM could not be set up: its tests are skipped" >&2
	@'$(BIN)/python' -m pytest tests/engines $(ARGS)

bench: $(VENV)/.test
	@'$(BIN)/python' bench/streaming.py

laws: $(VENV)/.test
	@'$(BIN)/python' -m tests.properties.laws --sessions '$(or $(SESSIONS),2000)'

# About twenty minutes on two cores. Broken off, it goes on where it stopped.
mutants: $(VENV)/.mutants
	@'$(BIN)/python' tests/mutants/run.py --folder '$(VENV)/mutants' --sample '$(or $(SAMPLE),100)' --seed '$(or $(SEED),1)'

# Three rounds take about five seconds.
torture: $(VENV)/.test
	@'$(BIN)/python' -m tests.torture --rounds '$(or $(ROUNDS),300)' --seed '$(or $(SEED),1)'

fuzz: $(VENV)/.test
	@'$(BIN)/python' -m tests.fuzz.readers --count '$(or $(COUNT),100000)' --seed '$(or $(SEED),1)'
	@'$(BIN)/python' -m tests.fuzz.store --count '$(or $(COUNT),100000)' --seed '$(or $(SEED),1)'

lint: $(VENV)/.lint
	'$(BIN)/ruff' check .
	'$(BIN)/ruff' format --check .
	'$(BIN)/mypy'
	'$(BIN)/lint-imports'

venv: $(VENV)/.demo
	@echo '$(VENV)'

clean:
	@if [ -e '$(VENV)' ] && [ "$$(cat '$(OWNER)' 2>/dev/null)" != '$(CURDIR)' ]; then \
		echo "$(VENV) does not say that it is this checkout's; look at it and remove it yourself" >&2; exit 2; fi
	rm -rf -- '$(VENV)' '$(CURDIR)/runs'

# The stamp comes last: what was broken off is finished by the next run.
$(VENV)/.made:
	@"$$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Turnloom needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@echo "==> making a virtual environment in $(VENV)"
	@mkdir -p '$(VENV)'
	@printf '%s\n' '$(CURDIR)' > '$(OWNER)'
	@"$$PYTHON" -m venv '$(VENV)'
	@'$(BIN)/python' -m pip --version > /dev/null
	@touch '$@'

$(VENV)/.demo: pyproject.toml | $(VENV)/.made
	@echo "==> installing turnloom with its agent and its embedded engine (about 660 MB in all, once)"
	@$(call INSTALL,agent$(comma)local)
	@touch '$@'

$(VENV)/.test: pyproject.toml | $(VENV)/.made
	@echo "==> installing turnloom and what its tests need (about 700 MB in all, once)"
	@$(call INSTALL,test)
	@touch '$@' '$(VENV)/.demo'

$(VENV)/.mutants: pyproject.toml | $(VENV)/.made
	@echo "==> installing turnloom, what its tests need and mutmut (once)"
	@$(call INSTALL,mutants)
	@touch '$@' '$(VENV)/.test' '$(VENV)/.demo'

$(VENV)/.lint: pyproject.toml | $(VENV)/.made
	@echo "==> installing turnloom and its linters (once)"
	@$(call INSTALL,test$(comma)lint)
	@touch '$@' '$(VENV)/.test' '$(VENV)/.demo'
