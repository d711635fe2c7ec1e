# Everything that this repository does, on a fresh Debian machine: `make demo` and `make test` set up all they need first.
# Each step leaves a stamp in build/stamps and runs again only when what it depends on has changed.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# A version manager's shim costs 100 ms at every start: take the distribution's own Python where it is new enough.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3.11 /usr/bin/python3.12 /usr/bin/python3.13) python3)
VENV := .venv
PY := $(VENV)/bin/python
DSEC := $(VENV)/bin/dsec
STAMPS := build/stamps
hash = $(shell cat $(1) 2>/dev/null | sha256sum | cut -c1-16)

APT := $(STAMPS)/apt-$(call hash,scripts/apt-packages.txt scripts/apt-install.sh)
APT_BENCH := $(STAMPS)/packages-bench-$(call hash,scripts/apt-packages-bench.txt scripts/apt-install.sh)
DEPS := $(STAMPS)/venv-$(call hash,pyproject.toml libdsec/pyproject.toml)
TOOLS := $(STAMPS)/tools-$(call hash,scripts/fetch-tools.sh src/dsec/linux/apt.py)
LAYERS := $(STAMPS)/layers-$(call hash,scripts/base-layers.sh src/dsec/images/bases.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

say = @printf '\033[1m== %s\033[0m\n' "$(1)"

.PHONY: help setup native demo test test-full lint asan bench dist clean distclean

help: ## this list
	@echo "make TARGET, where TARGET is one of:"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' Makefile | expand -t 14

setup: $(APT) $(DEPS) native $(TOOLS) $(LAYERS) ## all that demo and test need: packages, venv, native build, tools, base layers

demo: setup ## the main job: agents work on real projects in sandboxes and are scored
	$(call say,demo: 96 rollouts on a node of its own)
	@scripts/with-node.sh $(PY) -m dsec.demo $(ARGS)

test: setup ## all tests but the long counts (under 20 minutes)
	$(call say,test: native)
	@$(MAKE) -s -C native check
	$(call say,test: Python)
	@PYTHON=$(PY) scripts/test.sh $(ARGS)

test-full: setup ## all tests with the counts that the issues name
	@$(MAKE) -s -C native check
	@DSEC_TEST_FULL=1 PYTHON=$(PY) scripts/test.sh $(ARGS)

lint: $(DEPS) ## ruff and mypy
	@$(VENV)/bin/ruff check src libdsec/src tests bench hatch_build.py
	@$(VENV)/bin/mypy

native: $(APT) ## the supervisor (C)
	@$(MAKE) -s -C native

asan: $(APT) ## the supervisor with address and undefined-behaviour checks, and its tests
	@$(MAKE) -s -C native check-asan

bench: setup $(APT_BENCH) ## one benchmark: make bench NAME=create [ARGS=--quick]
	@test -n "$(NAME)" || { echo "make bench NAME=..., one of: $(patsubst bench/%.py,%,$(filter-out bench/_%,$(wildcard bench/*.py)))" >&2; exit 2; }
	@$(PY) -m bench.$(NAME) $(ARGS)

dist: $(DEPS) native ## both wheels into dist/
	@$(PY) -m build -q --wheel --no-isolation --outdir dist libdsec
	@$(PY) -m build -q --wheel --no-isolation --outdir dist .
	@ls -l dist/*.whl

clean: ## what was built, but not the base layers, the tools and the venv
	@$(MAKE) -s -C native clean
	@rm -rf dist $(STAMPS)/venv-* .pytest_cache .mypy_cache .ruff_cache
	@find src libdsec tests bench -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## everything that is not in the repository
	@rm -rf build .tools $(VENV)

$(APT):
	$(call say,setup: Debian packages)
	@sh scripts/apt-install.sh scripts/apt-packages.txt
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/apt-* && touch $@

$(APT_BENCH):
	$(call say,setup: Debian packages to measure against)
	@sh scripts/apt-install.sh scripts/apt-packages-bench.txt
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/packages-bench-* && touch $@

$(DEPS): | $(APT)
	$(call say,setup: Python packages in $(VENV) ($(PYTHON)))
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install -q -e ./libdsec -e '.[dev]'
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/venv-* && touch $@

$(TOOLS): | $(APT)
	$(call say,setup: newer host tools)
	@sh scripts/fetch-tools.sh
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/tools-* && touch $@

$(LAYERS): | $(APT) $(DEPS) native $(TOOLS)
	$(call say,setup: base layers (the first time takes a minute))
	@scripts/with-node.sh scripts/base-layers.sh
	@mkdir -p $(STAMPS) && rm -f $(STAMPS)/layers-* && touch $@
