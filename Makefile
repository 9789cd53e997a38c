# Two commands: `make demo` and `make test`. Both set everything up in .venv first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin

.PHONY: demo test lint types format bench clean

.venv/.ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade "$(TORCH)" "numpy>=1.26"
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@

demo: .venv/.ready
	$(BIN)/python -m hdet.lab.demo

test: lint types
	$(BIN)/python -m pytest

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.ready
	$(BIN)/python benchmarks/overhead.py

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
