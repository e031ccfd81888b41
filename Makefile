# `make demo` and `make test` set up everything they need in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests start a thousand processes, which would compile every module anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test fuzz format clean
.DEFAULT_GOAL := test

demo: $(VENV)/.package
	$(BIN)/covey demo

test: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 4 --dist worksteal -m 'not alone'
	$(BIN)/python -m pytest -q -m alone

# Looks for inputs that break a reader of bytes, and for words of one member that break the others.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.fuzz
	$(BIN)/python -m covey.testing.fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m covey.testing.hostile --seconds $(FUZZ_SECONDS) --seeds 1000000

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "covey needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

# atheris has wheels for Linux only; without it inputs are made by chance.
$(VENV)/.fuzz: requirements-fuzz.txt $(VENV)/.package
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: -r requirements-fuzz.txt
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
