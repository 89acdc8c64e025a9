# Every target sets itself up in .venv; a second run finds that done.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

SOURCES := $(VENV)/.sources

# All seeds of a test run are made from this number; BASE=random draws one. It is printed, and gives the same run again.
BASE ?= 0

.PHONY: help demo test test-deep lint types bench clean FORCE

help:  ## what there is to make
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# An editable install knows the files that were there: it is renewed when one comes or goes, not when one changes.
$(SOURCES): FORCE
	@mkdir -p $(VENV) && find src -name '*.py' | sort > $@.new && { cmp -s $@.new $@ || cp $@.new $@; }

$(INSTALLED): pyproject.toml constraints.txt tests/architectures.txt CMakeLists.txt $(wildcard csrc/*) $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps --requirement tests/architectures.txt
	touch $@

demo: $(INSTALLED)  ## what made Batch Normalization famous, on this machine, in minutes
	$(BIN)/normkit lab run paper --out runs/paper $(if $(wildcard runs/paper/run.json),--resume)

test: lint types  ## what to run after every change: lint, types and tests, in minutes
	$(BIN)/pytest --numprocesses auto --base $(BASE)

test-deep: $(INSTALLED)  ## every test: all rows, compilers, exporters, sanitizers, kills, browser
	$(BIN)/pytest --numprocesses auto --base $(BASE) --deep

lint: $(INSTALLED)  ## style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)  ## strict mypy over the package
	$(BIN)/mypy

bench: $(INSTALLED)  ## speed and import time, as ratios to torch on this machine
	$(BIN)/python benchmarks/bench_import.py
	$(BIN)/python benchmarks/bench_lab.py
	$(BIN)/normkit bench

clean:  ## forget the set-up and everything built
	rm -rf $(VENV) build dist
