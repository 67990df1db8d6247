# Two commands do everything on a fresh machine: `make demo` and `make test`. `make help` lists the rest.
#
#   PYTHON=python3.12             interpreter to start from
#   VENV=none                     use PYTHON as it is: no virtual environment, no network, nothing installed
#   PIP_ARGS="..."                arguments for the pip call that installs torch (another index)
#   TORCH="torch==2.15.0"         another torch than the newest (with a CUDA GPU) or the newest CPU build
#   JOBS=4                        test processes (2; one with VENV=none)
#   PYTEST_ARGS="-k cache -x"     arguments for pytest
#   SLOW=slow                     of `make slow`, only what every push runs
#   DEMO_ARGS="--help"            arguments for the demo

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
TORCH ?=
JOBS ?= 2
PYTEST_ARGS ?=
SLOW ?= slow or long
DEMO_ARGS ?=
export PYTHON VENV PIP_ARGS TORCH

RUN := $(if $(filter none,$(VENV)),$(PYTHON),$(VENV)/bin/python)
INSTALL := @sh tools/install.sh
PARALLEL := $(if $(filter none,$(VENV)),,OMP_NUM_THREADS=1)
PYTEST := $(PARALLEL) $(RUN) -m pytest $(if $(PARALLEL),-n $(JOBS) --dist worksteal)

.PHONY: help demo test slow gpu-test lint doctor clean
.DEFAULT_GOAL := help

help:
	@echo 'make demo      a small compiled model answers prompts on the paged cache'
	@echo 'make test      the test suite (about 6 minutes on 2 cores)'
	@echo 'make slow      the tests that take longer, and the whole fuzz'
	@echo 'make gpu-test  the tests that need a CUDA GPU'
	@echo 'make lint      ruff and mypy'
	@echo 'make doctor    what vattn can use on this machine'
	@echo 'make clean     remove .venv and everything that was generated'

demo:
	$(INSTALL) demo safetensors
	$(RUN) -m examples.demo $(DEMO_ARGS)

doctor:
	$(INSTALL) demo
	$(RUN) -m vattn doctor

test:
	$(INSTALL) test pytest hypothesis
	$(PYTEST) $(PYTEST_ARGS)

slow:
	$(INSTALL) test pytest hypothesis
	$(PYTEST) -m "($(SLOW)) and not gpu" $(PYTEST_ARGS)

gpu-test:
	$(INSTALL) test pytest hypothesis
	$(RUN) -m pytest -m gpu $(PYTEST_ARGS)

lint:
	$(INSTALL) dev,test ruff mypy
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
