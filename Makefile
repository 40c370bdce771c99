# `make demo` and `make test` are all a fresh machine needs; the rest is for working on certvol.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test check chaos setup setup-dev lint clean

demo: setup
	$(BIN)/certvol demo --out demo --seed 0

test: export OMP_NUM_THREADS = 1
test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: export OMP_NUM_THREADS = 1
check: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# A quarter of an hour: 100 kills, each run compared byte for byte with one that nobody disturbed.
chaos: setup-dev
	$(BIN)/python tests/chaos/driver.py --kills 100 --seed 0 --out docs/reliability.md

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "certvol needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv demo build dist src/*.egg-info
