# make summarize   sets everything up, then runs the demo
# make test        sets everything up, then runs the test suite
# Set-up installs into .venv in four steps. Each step leaves a stamp file when it is done: an interrupted set-up
# continues where it stopped, and a finished one is skipped.

PYTHON ?= python3
VENV   := .venv
BIN    = $(VENV)/bin
STAMPS := $(VENV)/stamps
LOG    = $(VENV)/install.log
UV     := 0.13.8

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: help install test summarize lock clean distclean
.DEFAULT_GOAL := help

help:
	@echo 'make summarize   summarise the demo texts with stock fairseq and with fairseq_el'
	@echo 'make test        run the linters and the test suite'
	@echo 'make install     only set up $(VENV) (the two above do it if needed)'
	@echo 'make lock        update requirements.lock, after changing requirements in pyproject.toml'
	@echo 'make clean       remove what the demo and the tests have built'
	@echo 'make distclean   the same, and $(VENV)'
	@echo 'Another Python:  make install PYTHON=python3.12'

install: $(STAMPS)/package

# One process per core, with one thread each: the tests are small.
test: install $(STAMPS)/triton
	@$(BIN)/python -m ruff check --quiet . && $(BIN)/python -m mypy
	@OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q --disable-warnings \
	  -n auto --maxprocesses 8 --dist loadfile tests

summarize: install
	@$(BIN)/python scripts/demo.py

# Installs what pyproject.toml asks for into a fresh environment, then writes down the versions and their checksums.
lock: VENV := build/lock
lock:
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	$(call pip,'[1/2] torch and build tools',$(call group,torch build) uv==$(UV))
	$(call pip,'[2/2] other requirements',--no-build-isolation -e '.[test]')
	@$(BIN)/python -m pip freeze --all --exclude-editable \
	  | grep -vE '^(torch|nvidia-.*|cuda-.*|pip|uv)(==| @)' | cat - <($(call groups,fairseq)) >$(VENV)/versions.txt
	@$(BIN)/uv pip compile --quiet --no-deps --generate-hashes --no-header --no-annotate \
	  --output-file requirements.lock $(VENV)/versions.txt

clean:
	@rm -rf build dist fairseq_el.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf $(VENV) fairseq_el/kernels/prebuilt

# $(call pip,MESSAGE,ARGUMENTS): runs pip install with its output in the log, and prints a dot every 10 seconds. When pip
# fails, prints the end of the log. The trap stops the dots however this ends.
define pip
	@printf '%s ' $(1); SECONDS=0; \
	while sleep 10; do printf .; done & trap 'kill '$$!' 2>/dev/null' EXIT; \
	$(BIN)/python -m pip install --disable-pip-version-check $(2) >$(LOG) 2>&1 \
	|| { printf '\n'; tail -n 20 $(LOG); echo 'Set-up failed; the whole log is in $(LOG)'; exit 1; }; \
	echo " $${SECONDS} s"
endef

# Everything is installed with the versions and checksums of requirements.lock, and nothing else (--no-deps). Only torch
# is installed by version and with what it needs: its builds for CPUs and for GPUs differ in both.
# $(call locked,NAMES) is the part of the lock file with these names, $(call locked,NAMES,!) the rest of it.
locked = --no-deps --require-hashes -r <(awk '/^[^ ]/ {chosen = /^($(1))/} $(2)chosen' requirements.lock)

# $(call groups,NAMES): prints the requirements of these dependency groups; $(call group,NAMES): as a file for pip.
groups = $(PYTHON) -c 'import tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
  print(*(line for name in "$(1)".split() for line in groups[name]), sep="\n")'
group = -r <($(call groups,$(1)))

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  'Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=python3.11'; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
	  'This Python cannot make virtual environments: install its venv package (Debian: python3-venv)'; exit 1; }
	@$(PYTHON) -c 'import pathlib, sysconfig; (pathlib.Path(sysconfig.get_path("include")) / "Python.h").open()' \
	  2>/dev/null || { echo 'The headers of Python are missing: install them (Debian: python3-dev)'; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo \
	  'A C++ compiler is needed to build fairseq: install one (Debian: g++) or name it in CXX'; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/requirements: requirements.lock | $(STAMPS)/venv
	$(call pip,'[1/4] requirements',$(call locked,fairseq|triton,!))
	@touch $@

$(STAMPS)/torch: $(STAMPS)/requirements
	$(call pip,'[2/4] torch: a large download',$(call group,torch))
	@touch $@

$(STAMPS)/fairseq: $(STAMPS)/torch
	$(call pip,'[3/4] fairseq: compiles for about 3 minutes',--no-build-isolation $(call locked,fairseq))
	@touch $@

# Large, and needed on GPUs, whose builds of torch bring it; elsewhere only the tests of its kernels use it.
$(STAMPS)/triton: $(STAMPS)/torch
	$(call pip,'Triton for the tests: a large download',$(call locked,triton))
	@touch $@

$(STAMPS)/package: $(STAMPS)/fairseq setup.py pyproject.toml $(wildcard fairseq_el/kernels/cpp/*)
	$(call pip,'[4/4] fairseq_el: compiles its kernels',--no-build-isolation --no-deps -e .)
	@touch $@
