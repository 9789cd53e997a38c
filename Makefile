# `make demo` and `make test`, and `make test-all` for the tests that take long. Each first sets up what it needs in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
# Python compiles a module when it is first imported; compiling all of torch would take the demo longer than the download.
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile

PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all quick browser lint types format bench soak matrix oldest docs clean

.venv/.demo: pyproject.toml lab/pyproject.toml
	@echo "Setting up .venv: torch and the packages of the demo, about a minute."
	@$(PYTHON) -m venv .venv
	@$(PIP) "$(TORCH)" -e . -e lab
	@touch $@

.venv/.ready: .venv/.demo
	$(PIP) "$(TORCH)" -e ".[dev]" -e "lab[dev]"
	$(BIN)/python -m compileall -q -j 0 .venv/lib > /dev/null || true # many processes import torch, and some may not write
	touch $@

demo: .venv/.demo
	$(BIN)/hdet demo

# Lint and types beside the tests. What is marked slow is left to `make test-all`, which has the rest.
test: .venv/.ready
	@$(MAKE) --no-print-directory -j 3 lint types quick

# And what decides and steps once more without assertions, which no code may rely on.
test-all: .venv/.ready browser
	$(PYTEST) -m slow
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -O -m pytest -n 2 --dist loadfile -m "not slow" -W ignore::pytest.PytestConfigWarning \
	  tests/policy tests/controllers tests/schedulers

# In the order of the folders: files with few tests, which xdist would leave for the end, are among the longest.
# Many processes import the package and its tests, which are compiled once, whatever the environment says.
quick: .venv/.ready
	$(PYTEST) -m "not slow"

# A test opens a report in a real browser, and is skipped where there is none.
browser:
	@command -v chromium >/dev/null 2>&1 || { command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ] && \
	  { apt-get install -y -qq chromium || { apt-get update -qq && apt-get install -y -qq chromium; }; }; } \
	  >/dev/null 2>&1 || true

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready
	$(BIN)/python lab/benchmarks/overhead.py

# The long versions of what `make test` has in short: four minutes on two cores.
soak: .venv/.ready
	$(BIN)/python tests/support/soak.py --scenarios 200 --seed 0
	$(BIN)/python tests/support/fuzz_state.py --mutations 10000 --seed 5

# The wheel, without extras, on every Python of this machine; TORCH_EACH=torch==... installs torch on each.
matrix: .venv/.ready
	TORCH="$(TORCH_EACH)" tools/matrix.sh

# The core's tests on the oldest torch that is promised; OLDEST=torch==2.8.0 for another.
OLDEST ?= torch==2.6.0
CORE := policy controllers schedulers golden engine signals weights knobs replicas
oldest:
	$(PYTHON) -m venv .venv/oldest
	.venv/oldest/bin/pip install --quiet --disable-pip-version-check "$(OLDEST)" "numpy<2" -e ".[test]"
	PYTHONPATH=lab/src .venv/oldest/bin/python -m pytest -n 2 --dist loadfile -m "not slow" $(addprefix tests/,$(CORE))

docs: .venv/.ready
	$(PIP) -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
