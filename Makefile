# `make demo` and `make test` install the packages that they need into .venv.
PYTHON ?= python3
BIN := .venv/bin
TEST_JOBS ?= 2
MINUTES ?= 10
SEED ?=
TURN ?=
PYTHONS ?=

INSTALL := $(BIN)/python -m pip install --quiet --editable

PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal
# The tests that need a GPU, run by CuPy in processes that see emulated GPUs.
DEVICE_PYTEST := $(BIN)/python -m tests.device -m pytest -n $(TEST_JOBS) --dist worksteal \
	tests/gpu tests/device

.PHONY: demo test test-rest test-all test-slow test-chips test-compilers test-device \
	fuzz lint docs release clean

demo: .venv/installed
	$(BIN)/cupyconv grads --preset multi-channel
	@echo
	@echo "Next, see why, in a browser: $(BIN)/cupyconv explain --preset multi-channel --open"

# A few cases of every test, in minutes.
test: .venv/installed-test
	$(PYTEST) -m "not slow" --part sample

# All other cases, or with TURN=2/3 the second third of them, and a few cases on emulated GPUs.
test-rest: .venv/installed-test lint
	$(PYTEST) -m "not slow" --part rest $(if $(TURN),--turn $(TURN))
	$(DEVICE_PYTEST) -m "not slow" --part sample

# All cases on emulated GPUs; takes more than an hour.
test-device: .venv/installed-test
	$(DEVICE_PYTEST) -m "not slow"

# Every variant of the kernels for every chip; CI compiles a part of the variants per commit.
test-chips: .venv/installed-test
	$(PYTEST) -m slow tests/kernels/test_kernel_compile.py tests/planning/test_planning.py

# Every variant for every chip, with the compilers of all CUDA releases, which are downloaded.
test-compilers: .venv/installed-test
	$(BIN)/python -m tests.compilers

test-all: test test-rest test-chips test-compilers test-device

test-slow: .venv/installed-test
	$(PYTEST) -m slow

fuzz: .venv/installed-fuzz
	$(BIN)/python -m tests.fuzz --jobs $(TEST_JOBS) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Builds the pages of notebooks/ in build/docs; a warning is an error.
docs: .venv/installed-docs
	$(BIN)/python -m sphinx -W --keep-going --quiet -E -j $(TEST_JOBS) -d build/doctrees notebooks build/docs
	@echo "read them in build/docs/index.html"

# Builds the sdist and the wheel in dist, and tries them with every supported Python, or with PYTHONS=3.14.
release: .venv/installed-release
	$(BIN)/python -m tests.release --out dist $(PYTHONS:%=--python %)

clean:
	rm -rf .venv build dist *.egg-info

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | $(BIN)/python
	$(INSTALL) .
	touch $@

.venv/installed-test: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[test]"
	$(INSTALL) ".[compilers]"
	touch $@ .venv/installed

.venv/installed-docs: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[docs]"
	touch $@ .venv/installed

.venv/installed-release: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[release]"
	touch $@ .venv/installed

.venv/installed-fuzz: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[test,fuzz]"
	$(INSTALL) ".[compilers]"
	touch $@ .venv/installed-test .venv/installed
