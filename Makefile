# labkit. `make help` lists what there is to do.

PYTHON ?= python3
# Another wheel index for torch alone, for Linux laptops that want the CPU build instead of 3 GB of CUDA:
#   make run TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Two stamps: what `make run` needs, and what the tests need on top. Newer than pins and metadata: nothing to install.
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
MEGATRON := megatron-core==0.16.1
# Its pure wheel, beside the environment and not in it: tests read and run the Python source of its graphs.
ENGINE := transformer_engine==2.20.2
BENCHMARKS = $(filter-out benchmarks/gpu.py benchmarks/plan_on_cpu.py benchmarks/scaling.py,$(shell grep -l __main__ benchmarks/*.py))

.DEFAULT_GOAL := help
.PHONY: help run lab exercises docs test sweep faults chapters gpu bench clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## */\1	/p' $(MAKEFILE_LIST) | expand -t 12

run: $(INSTALLED)  ## train a small GPT on 4 ranks, TP2 x PP2, against one process; report in build/
	$(BIN)/labkit run 00 --out build --html

lab: $(INSTALLED)  ## open JupyterLab on your copies of the chapters: chapters, or TO=folder; what you changed is kept
	$(BIN)/labkit lab $(if $(TO),--dir $(TO))

exercises: $(INSTALLED)  ## write the copies that `make lab` opens, without solutions and outputs: chapters, or TO=folder
	$(BIN)/labkit exercises $(if $(TO),--dir $(TO))

docs: $(INSTALLED_DEV)  ## the site of pages, chapters and reference, to read in a browser: build/site/index.html
	$(BIN)/python scripts/make_docs.py

test: $(INSTALLED_DEV)  ## everything that must pass: lint, types, layers, tests, chapters
	$(BIN)/python scripts/run_tests.py

sweep: $(INSTALLED_DEV)  ## the long matrices that `make test` covers by a subset; PART=list names its parts, PART=faults runs one
	$(BIN)/python scripts/sweep.py $(PART)

faults: $(INSTALLED_DEV)  ## kill, stop, damage and fill what a run needs, hundreds of times; results in docs/survival.md; PART as for sweep
	$(BIN)/python scripts/survival.py $(PART)

chapters: $(INSTALLED_DEV)  ## execute every chapter again and store its outputs
	$(BIN)/python scripts/run_chapters.py

gpu: $(INSTALLED_DEV)  ## what fits into ten minutes of the tests and benchmarks that need CUDA; results in build/gpu
	PYTHON=$(abspath $(BIN))/python scripts/gpu_suite.sh

bench: $(INSTALLED_DEV)  ## the benchmarks of a laptop, each beside its peer, one after the other (leave the machine alone meanwhile)
	@set -e; for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file; done

clean:  ## remove build/ and caches; the environment stays (rm -r .venv to remove it)
	rm -rf build .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo "labkit needs Python 3.11 to 3.14; name one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "no environment was made; on Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing labkit and what it needs into $(VENV): once, a few minutes"
	$(PIP) install -q -c constraints.txt setuptools
	$(if $(TORCH_INDEX),$(PIP) install -q -c constraints.txt --no-deps --index-url $(TORCH_INDEX) torch)
	$(PIP) install -q -c constraints.txt --no-build-isolation -e .
	touch $@

# megatron-core is an oracle of the tests. Without its dependencies: they are training extras that CPU parity needs none of.
$(INSTALLED_DEV): $(INSTALLED)
	@echo "installing what the tests need into $(VENV): once, a minute or two"
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev,docs,oracles,mutants]'
	$(PIP) install -q -c constraints.txt --no-deps $(MEGATRON)
	rm -rf $(VENV)/te-source
	$(PIP) install -q --no-deps --no-compile --target $(VENV)/te-source $(ENGINE)
	touch $@
