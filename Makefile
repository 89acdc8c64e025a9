# Every target sets itself up in .venv; a second run finds that done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_LAB := $(VENV)/.installed-lab
INSTALLED_DOCS := $(VENV)/.installed-docs

SOURCES := $(VENV)/.sources

# All seeds of a test run are made from this number; BASE=random draws one. It is printed, and gives the same run again.
BASE ?= 0

# The instruction set of the C++ loops in a test run: avx512, avx2 or baseline; the machine's best if empty.
ISA ?=
PYTEST = $(BIN)/pytest --numprocesses auto --base $(BASE) $(if $(ISA),--isa $(ISA))

.PHONY: help demo test test-deep lint types bench docs dist changelog clean FORCE

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# An editable install knows the files that were there: it is renewed when one comes or goes, not when one changes.
$(SOURCES): FORCE
	@mkdir -p $(VENV) && find src -name '*.py' | sort > $@.new && { cmp -s $@.new $@ || cp $@.new $@; }

BUILT_FROM := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*) $(SOURCES)

$(INSTALLED): $(BUILT_FROM) tests/architectures.txt tests/aside.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --requirement tests/architectures.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(VENV)/aside --requirement tests/aside.txt
	touch $@ $(INSTALLED_LAB)

$(INSTALLED_LAB): $(BUILT_FROM)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[lab]'
	touch $@

# By its name, which pip finds installed: another editable install would compile the core again.
$(INSTALLED_DOCS): $(INSTALLED_LAB)
	$(BIN)/pip install --quiet --constraint constraints.txt 'normkit[docs]'
	touch $@

demo: $(INSTALLED_LAB)  ## what made Batch Normalization famous, on this machine, in minutes: one seed
	$(BIN)/normkit lab run paper --seeds 1 --out runs/paper $(if $(wildcard runs/paper/run.json),--resume)

test: lint types  ## what to run after every change: lint, types and tests, in minutes
	$(PYTEST)

test-deep: $(INSTALLED)  ## every test: all rows, compilers, exporters, sanitizers, kills, browser
	$(PYTEST) --deep

lint: $(INSTALLED)  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## strict mypy over the package
	$(BIN)/mypy

docs: $(INSTALLED_DOCS)  ## the documentation as a site, in build/site/index.html
	$(BIN)/sphinx-build --builder html --fresh-env --fail-on-warning --keep-going --nitpicky --doctree-dir build/doctrees docs build/site

bench: $(INSTALLED)  ## speed and import time, as ratios to torch on this machine
	$(BIN)/python benchmarks/bench_import.py
	$(BIN)/python benchmarks/bench_lab.py
	$(BIN)/normkit bench

# Never without the C++ core: a release that lost it would be valid, and slow.
dist: export NORMKIT_REQUIRE_CORE := 1
dist: $(INSTALLED)  ## wheel and sdist, each tried in an empty environment
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	PYTHONPATH=tests:docs/_ext $(BIN)/python tools/check_dist.py dist/*

changelog: $(INSTALLED)  ## what the next release will say, from the fragments in changelog/
	$(BIN)/towncrier build --draft --version "$$($(BIN)/python -c 'import normkit; print(normkit.__version__)')"

clean:  ## forget the set-up and everything built
	rm -rf $(VENV) build dist
