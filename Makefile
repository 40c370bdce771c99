# `make demo` and `make test` set up everything they need; the rest is for working on certvol.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo test check docs wheel chaos browser setup setup-dev lint hooks clean

demo: setup
	$(BIN)/certvol demo --out demo --seed 0
	@echo "certvol is installed in .venv: call $(BIN)/certvol, or run \`source $(BIN)/activate\` once and call certvol"

# All checks, as CI runs them, and the share of each module's lines that the tests reach.
test: export CERTVOL_SCREENSHOTS ?= $(CURDIR)/build/screenshots
test: lint docs wheel browser
	$(PYTEST) --cov --cov-report term

# The fast checks, in under three minutes.
check: lint
	$(PYTEST) -m "not slow"

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Build the site in build/site; warnings are errors, and every link is checked.
docs: setup-dev
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --quiet
	$(BIN)/python tools/check_site.py build/site

# Build the sdist and the wheel in dist/, and use the wheel in an empty environment.
wheel: setup-dev
	$(BIN)/python tools/check_wheel.py --out dist

# Half an hour: 100 kills over all methods; every run must end with the bytes of an undisturbed one.
chaos: setup-dev
	$(BIN)/python tools/chaos.py --kills 100 --seed 0 --jobs 2 --out docs/reliability.md

# The tests of the report need a real browser; they are skipped if none can be installed.
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && { \
	  apt-get install -y --no-install-recommends chromium || \
	  { apt-get update && apt-get install -y --no-install-recommends chromium; }; \
	} >/dev/null 2>&1; } || echo "no chromium, and no right to install it: browser tests are skipped"

# Run ruff, mypy and codespell before every commit.
hooks: setup-dev
	$(BIN)/pre-commit install

setup: .venv/installed
setup-dev: .venv/installed-dev

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "certvol needs Python 3.11 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv demo build dist src/*.egg-info
