# make env | demo | test | test-all | test-models | release-check | lint | docs. Each makes what it needs; a bare machine with Python 3.10 or newer is enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: env demo test test-all test-models release-check lint docs
env: .venv/.done

.venv/.done: pyproject.toml bench/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frost]" -e "./bench[digits]"
	touch $@

demo: env
	$(BIN)/python -m undrift_bench.demo --out out/demo

# Two processes, one thread each: the tensors are small, and a second thread would only wait.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The quick tests: three minutes on two cores.
test: env
	$(PYTEST) -m "not slow"

# With Triton, whose interpreter runs a GPU's kernels on a CPU: nothing but the tests needs it here.
.venv/.tests: .venv/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,frost,tests]" -e "./bench[digits]"
	touch $@

# Everything; the end of the output lists what needs a GPU where there is none.
test-all: .venv/.tests
	$(PYTEST)

# Real networks of timm, torchvision, transformers and MONAI beside the newest PyTorch; some gigabytes.
.venv-models/.done: pyproject.toml bench/pyproject.toml constraints-models.txt
	$(PYTHON) -m venv .venv-models
	.venv-models/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-models.txt \
	  -e ".[dev,examples]" -e "./bench[digits]"
	touch $@

test-models: .venv-models/.done
	OMP_NUM_THREADS=1 .venv-models/bin/python -m pytest -n 2 --dist worksteal tests/real_models

# Build the release, check it, and run README's example from its wheel in an empty environment.
release-check: env
	$(BIN)/python tests/support/release.py --out dist

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/.docs: .venv/.done
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
