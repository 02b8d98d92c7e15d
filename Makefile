# `make demo` and `make test` set up what they need in .venv.
PYTHON ?= python3
BIN := .venv/bin
TEST_JOBS ?= 2
MINUTES ?= 10
SEED ?=
TURN ?=

INSTALL := $(BIN)/python -m pip install --quiet --editable

PYTEST := $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal
# CuPy without a GPU: what needs a device, in processes that see emulated ones.
DEVICE_PYTEST := $(BIN)/python -m tests.device -m pytest -n $(TEST_JOBS) --dist worksteal \
	tests/gpu tests/device

.PHONY: demo test test-rest test-all test-slow test-chips test-compilers test-device witnesses \
	beliefs fuzz lint mutants docs wheel matrix clean

demo: .venv/installed
	$(BIN)/cupyconv grads --preset multi-channel

# A few cases of every test, in minutes.
test: .venv/installed-test
	$(PYTEST) -m "not slow" --part sample

# All other cases, or with TURN=2/3 the second of three parts, and a few of those that need a device.
test-rest: .venv/installed-test lint
	$(PYTEST) -m "not slow" --part rest $(if $(TURN),--turn $(TURN))
	$(DEVICE_PYTEST) -m "not slow" --part sample

# All cases of what needs a device: for an hour and more.
test-device: .venv/installed-test
	$(DEVICE_PYTEST) -m "not slow"

# Every variant of the kernels for every chip, where CI has the variants take turns.
test-chips: .venv/installed-test
	$(PYTEST) -m slow tests/test_kernel_compile.py tests/test_planning.py

# Every variant for every chip, by the compilers of all releases of CUDA, which are downloaded.
test-compilers: .venv/installed-test
	$(BIN)/python -m tests.compilers

test-all: test test-rest test-chips test-compilers test-device witnesses

test-slow: .venv/installed-test
	$(PYTEST) -m slow

# Kernels of others on the emulator; as on CI, what is missing fails the run.
witnesses: .venv/installed-witnesses
	CI=true $(PYTEST) -m slow tests/test_emulator_witnesses.py tests/test_emulator_beliefs.py

# Which of them bear out what the emulator believes of the chip, written to confirmed.toml.
beliefs: .venv/installed-witnesses
	$(BIN)/python -m tests.emulator.beliefs --jobs $(TEST_JOBS)

fuzz: .venv/installed-fuzz
	$(BIN)/python -m tests.fuzz --jobs $(TEST_JOBS) --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: .venv/installed-test
	$(BIN)/python -m tests.emulator.mutants --jobs $(TEST_JOBS)

# The pages in notebooks/, into build/docs; a warning is an error.
docs: .venv/installed-docs
	$(BIN)/python -m sphinx -W --keep-going --quiet -E -j $(TEST_JOBS) notebooks build/docs
	@echo "read them in build/docs/index.html"

wheel: .venv/installed-test
	$(BIN)/python -m build

# Both distributions, installed in clean environments of every Python that is here.
matrix: .venv/installed-test
	$(BIN)/python -m tests.matrix --out dist

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

.venv/installed-witnesses: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[test,witnesses]"
	$(INSTALL) ".[compilers]"
	touch $@ .venv/installed-test .venv/installed

.venv/installed-docs: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[docs]"
	touch $@ .venv/installed

.venv/installed-fuzz: pyproject.toml | $(BIN)/python
	$(INSTALL) ".[test,fuzz]"
	$(INSTALL) ".[compilers]"
	touch $@ .venv/installed-test .venv/installed
