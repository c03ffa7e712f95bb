# make demo        watch the packaged models write with and without speculation
# make test        the tests, a few minutes on two cores
# make check       lint, format, types, import layers; C kernels fuzzed under sanitizers
# make test-without-kernels   tests of models and promises on PyTorch's operations alone
# make test-full   the long versions of the losslessness tests too
# make test-speculators   heads against the `speculators` package, in an environment of its own
# make docs        write the generated documents again
#
# Variables: PYTHON (python3), VENV (.venv), TORCH_INDEX (another package index for PyTorch alone,
# such as https://download.pytorch.org/whl/cpu where pip's default is a CUDA build), ARGS (passed on
# to the demo or to pytest).

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet -c constraints.txt

.PHONY: demo test test-without-kernels test-full test-speculators check docs format clean

demo: $(VENV)/.installed
	$(RUN) -m foretoken demo $(ARGS)

# One process per core; a file's tests stay together, since they share models.
test: $(VENV)/.installed-dev
	$(RUN) -m pytest -n auto --dist loadfile $(ARGS)

PLAIN = tests/golden tests/e2e/test_losslessness.py tests/e2e/test_quantized.py \
  tests/e2e/test_int8_kv.py tests/unit/kernels tests/unit/test_stored_kv.py \
  tests/unit/test_linear.py tests/unit/test_quant.py tests/unit/test_attention.py

test-without-kernels: $(VENV)/.installed-dev
	FORETOKEN_KERNELS=off $(RUN) -m pytest -n auto --dist loadfile $(PLAIN) $(ARGS)

test-full: $(VENV)/.installed-dev
	$(RUN) -m pytest -n auto --dist loadfile -m "full or not full" --timeout=3600 $(ARGS)

# The package wants other versions than we test with (and a CUDA build of PyTorch: 6 GB).
SPECULATORS := .venv-speculators

test-speculators: $(SPECULATORS)/.installed
	$(SPECULATORS)/bin/python -m pytest tests/golden/test_speculators.py $(ARGS)

$(SPECULATORS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SPECULATORS)
	@echo "Installing the speculators package"
	$(SPECULATORS)/bin/python -m pip install --quiet -e ".[speculators]"
	@touch $@

check: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports
	$(RUN) scripts/fuzz_kernels.py 20

docs: $(VENV)/.installed-dev
	$(RUN) scripts/write_configuration.py
	$(RUN) scripts/write_cli_help.py
	$(RUN) scripts/write_dashboard.py

format: $(VENV)/.installed-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) $(SPECULATORS) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Foretoken needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# PyTorch first and alone, so that another index serves nothing else.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "Installing PyTorch (once; some minutes on a slow line)"
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "Installing Foretoken"
	$(PIP) -e ".[serve]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools of the tests"
	$(PIP) -e ".[dev]"
	@touch $@
