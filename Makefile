# `make demo` and `make test` are all a fresh machine needs; the rest is for working on certvol.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test check chaos browser setup setup-dev lint clean

demo: setup
	$(BIN)/certvol demo --out demo --seed 0

test: export OMP_NUM_THREADS = 1
test: export CERTVOL_SCREENSHOTS ?= $(CURDIR)/build/screenshots
test: lint browser
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: export OMP_NUM_THREADS = 1
check: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Half an hour: 100 kills over all methods, each run compared byte for byte with one that nobody disturbed.
chaos: setup-dev
	$(BIN)/python tests/chaos/driver.py --kills 100 --seed 0 --jobs 2 --out docs/reliability.md

# The report is tested in a real browser. Where none can be installed, those tests are skipped and say so.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { \
	  apt-get install -y --no-install-recommends chromium || { apt-get update && apt-get install -y --no-install-recommends chromium; }; \
	} >/dev/null 2>&1; } || echo "no chromium, and no right to install it: the browser tests will be skipped"

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
