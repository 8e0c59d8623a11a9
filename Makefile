# make env | demo | test | lint | docs. Each makes what it needs; a bare machine with Python 3.10 or newer is enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: env demo test lint docs
env: .venv/.done

.venv/.done: pyproject.toml bench/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frost]" -e "./bench[digits]"
	touch $@

demo: env
	$(BIN)/python -m undrift_bench.demo --out out/demo

# With Triton, whose interpreter runs a GPU's kernels on a CPU: nothing but the tests needs it here.
.venv/.tests: .venv/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frost,tests]" -e "./bench[digits]"
	touch $@

# Two processes, one thread each: the tensors are small, and a second thread would only wait.
test: .venv/.tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/.docs: .venv/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
