# `make demo` and `make test` set up everything they need in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without --no-compile pip compiles 10,000 modules, one after the other; Python compiles those that it imports.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

NATIVE := build_native.py $(wildcard src/covey/native/*)

# Tests start a thousand processes, which would compile every module anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: page-checks shots demo test test-all test-fifth check coverage stress simulate fuzz sanitize house format docs cast lock wheel sbom clean
.DEFAULT_GOAL := test

demo: $(VENV)/.package
	$(BIN)/covey demo

# Types are checked beside the tests, which wait much of the time: all of them as mypy sees them, and what a program sees as
# pyright does. Both are waited for, and either may fail.
WORKERS ?= 8
PYTEST := $(BIN)/python -m pytest -q --workers $(WORKERS) $(if $(SHUFFLE),--shuffle $(SHUFFLE))
define with-types
$(BIN)/ruff format --check .
$(BIN)/ruff check .
@{ $(BIN)/mypy && $(BIN)/basedpyright; } & types=$$!; \
$(1); tests=$$?; \
wait $$types && exit $$tests
endef

# What a change usually breaks.
test: $(VENV)/.built
	$(call with-types,$(PYTEST) -m 'not thorough')

# Everything, and the contract of groups once more with the Python executor alone.
test-all: $(VENV)/.all $(VENV)/.browser $(VENV)/.node $(VENV)/.docs
	$(call with-types,$(PYTEST))
	TEST_EXECUTORS=python $(PYTEST) tests/contract

# What CI adds to `make test`: a fifth of what only `make test-all` has, chosen by the commit's hash.
COMMIT ?= $(shell git rev-parse HEAD)
test-fifth: $(VENV)/.all $(VENV)/.browser $(VENV)/.node $(VENV)/.docs
	$(PYTEST) --fifth $(COMMIT)
	TEST_EXECUTORS=python $(PYTEST) --fifth $(COMMIT) --fifth-of-all tests/contract

# The page of `covey ui` in a real browser: a line for each check.
page-checks: $(VENV)/.all $(VENV)/.browser
	$(BIN)/python -m tools.page_checks

# Pictures of real runs for README and docs.
shots: $(VENV)/.all $(VENV)/.browser
	$(BIN)/python -m tools.shots docs

# The inner loop: what needs no second process and no network.
check: $(VENV)/.built
	$(call with-types,$(PYTEST) -m 'not thorough and not alone' \
		tests/unit tests/contract tests/sim tests/test_architecture.py tests/test_public_api.py)

# The lines and branches of src that `make test` reaches, but for tests that hold budgets: measuring takes more than those
# allow. Tests that fail are told, and what they reached counts. COVERAGE_TESTS=tests/io for less.
COVERAGE_TESTS ?= tests
coverage: $(VENV)/.built
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest -q --workers $(WORKERS) -m 'not thorough and not alone' $(COVERAGE_TESTS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Stops the processes of tests for random moments; prints what failed, with the seed.
STRESS_ROUNDS ?= 1
STRESS_TESTS ?= tests
STRESS_OPERATIONS ?= 20000
stress: $(VENV)/.built
	$(BIN)/python -m covey.lab.call_stress $(if $(STRESS_SEED),--seed $(STRESS_SEED))
	$(BIN)/python -m covey.lab.soak --operations $(STRESS_OPERATIONS) $(if $(STRESS_SEED),--seed $(STRESS_SEED))
	$(BIN)/python -m tools.stress --rounds $(STRESS_ROUNDS) $(if $(STRESS_SEED),--seed $(STRESS_SEED)) -- $(STRESS_TESTS)

# Plays many more random courses of events in the simulations of protocols than `make test` does.
SEEDS ?= 20
simulate: $(VENV)/.built
	TEST_SEEDS=$(SEEDS) $(BIN)/python -m pytest -q --workers $$(nproc) tests/sim

# Looks for inputs that break a reader of bytes, and for words of one member that break the others.
FUZZ_SECONDS ?= 600
fuzz: $(VENV)/.fuzz
	$(BIN)/python -m covey.lab.fuzz --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m covey.lab.hostile --seconds $(FUZZ_SECONDS) --seeds 1000000

# The tests of the compiled executor with random inputs, under AddressSanitizer and UndefinedBehaviorSanitizer, then
# under ThreadSanitizer. Needs gcc.
SANITIZE_SEEDS ?= 2000
sanitize: $(VENV)/.built
	CC=gcc $(BIN)/python -m tools.sanitize address thread --seeds $(SANITIZE_SEEDS)

# Where the source drifts: short modules, knots of types, what takes `Node`, names that occur twice, lines by room.
house: $(VENV)/.built
	@$(BIN)/python -m tools.house

format: $(VENV)/.built
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site: any warning and any dead link fails the build. MkDocs 1.6 is pinned, so Material need not advertise another.
docs: $(VENV)/.docs
	$(BIN)/python -m tools.command_reference
	$(BIN)/python -m tools.settings_reference
	$(BIN)/python -m tools.metrics_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "site/index.html"

# The recording in README.md: runs the demo and draws what it prints.
cast: $(VENV)/.package
	$(BIN)/python -m tools.cast docs/demo.svg

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "covey needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.package: pyproject.toml $(NATIVE) | $(BIN)/python
	$(PIP) --editable .
	@touch $@

# Everything but torch is checked against the hashes in the lock, and a build fetches nothing.
$(VENV)/.dev: requirements-dev.lock requirements-torch.txt pyproject.toml tools/install.py | $(BIN)/python
	$(BIN)/python tools/install.py requirements-dev.lock
	@touch $@

$(VENV)/.all: requirements-all.lock $(VENV)/.built
	$(BIN)/python tools/install.py requirements-all.lock
	$(BIN)/python -m pip check
	@touch $@

# Without a browser the checks of the page fail, and say what to install.
$(VENV)/.browser: tools/browser.py | $(VENV)/.built
	-$(BIN)/python -m tools.browser
	@touch $@

# What programs in JavaScript need to be ranks at a gateway; npm checks it against the hashes in the lock.
$(VENV)/.node: tests/node/package.json tests/node/package-lock.json | $(BIN)/python
	mkdir -p $(VENV)/node && cp tests/node/package*.json $(VENV)/node
	-cd $(VENV)/node && npm ci --ignore-scripts --no-audit --no-fund
	@touch $@

# Builds the compiled executor, too; without a working compiler the rest is installed all the same.
$(VENV)/.built: $(VENV)/.dev $(NATIVE)
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	@touch $@

lock: $(VENV)/.all
	$(BIN)/python -m tools.lock

wheel: $(VENV)/.built
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .

# Beside the wheel: what it needs to run, with versions, hashes and licences, as CycloneDX JSON.
sbom: wheel
	$(BIN)/python -m tools.sbom dist/*.whl

# atheris has wheels for Linux only; without it inputs are made by chance.
$(VENV)/.fuzz: requirements-fuzz.txt $(VENV)/.package
	-$(PIP) --only-binary :all: -r requirements-fuzz.txt
	@touch $@

$(VENV)/.docs: requirements-docs.txt $(VENV)/.package
	$(PIP) -r requirements-docs.txt
	@touch $@

clean:
	rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache
