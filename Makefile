# make env | demo | test | lint. Each makes what it needs; a bare machine with Python 3.10 or newer is enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: env test lint
env: .venv/.done

.venv/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frost,digits]"
	touch $@

test: env
	$(BIN)/python -m pytest

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
