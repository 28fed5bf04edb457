# `make` or `make help` lists the targets.
#
# Which Python: PYTHON=… where given (or exported), used as it is. Otherwise a python3 that already has a CUDA build of
# torch, used as it is. Otherwise $(VENV), which `make setup` creates from constraints.txt.
#   make test-gpu PYTHON=python3      no virtual environment, no install, no network
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu      where PyPI's torch would be a CUDA build

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
TORCH_INDEX ?=
STAMP := $(VENV)/.stamp

# Reads torch/version.py instead of importing torch: this runs on every call of make.
CUDA_TORCH = import importlib.util, os, runpy; \
    spec = importlib.util.find_spec("torch"); \
    path = spec and spec.origin and os.path.join(os.path.dirname(spec.origin), "version.py"); \
    print("yes" if path and runpy.run_path(path).get("cuda") else "")

ifndef PYTHON
  ifeq ($(origin VENV),file)
    ifeq ($(shell python3 -c '$(CUDA_TORCH)' 2>/dev/null),yes)
      PYTHON := python3
    endif
  endif
endif
ifdef PYTHON
  READY :=
else
  PYTHON := $(VENV)/bin/python
  READY := $(STAMP)
endif

PYTEST := $(PYTHON) -m pytest
ARGS ?=
FAST := tests/idioms tests/fusions/test_matching.py --ignore tests/idioms/test_perturbed.py

.PHONY: help setup test test-fast test-slow test-timed fuzz test-gpu sanitize-gpu lint format types demo bench docs clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  \1\t\2/' | expand -t 16

setup: $(READY) ## create .venv with torch, this package and the development tools; nothing to do when up to date
	@$(PYTHON) -c 'import sys, torch; print(f"python {sys.version.split()[0]}, torch {torch.__version__}: {sys.executable}")'

# torch comes first and alone: its pin must be settled before another package's range can pull a larger build.
$(STAMP): pyproject.toml constraints.txt
	@base=; for p in python3 python3.11 python3.12 python3.13; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then base=$$p; break; fi; \
	done; \
	[[ -n $$base ]] || { echo "no Python 3.11 or newer found on PATH" >&2; exit 1; }; \
	echo "creating $(VENV) with $$($$base --version)"; \
	[[ -x $(VENV)/bin/python ]] || $$base -m venv $(VENV)
	@echo "installing $$(grep '^torch==' constraints.txt)"
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$$(grep '^torch==' constraints.txt)"
	@echo "installing fusion_passes with its development and example dependencies"
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

test: $(READY) ## the default suite, in parallel on all cores, without a GPU
	$(PYTEST) tests -n auto --dist worksteal -m "not gpu and not slow and not timed" $(ARGS)

test-fast: $(READY) ## idioms and matching alone, in under a minute: for work on a reader or a rule
	$(PYTEST) $(FAST) -n auto --dist worksteal -m "not gpu and not slow and not timed" $(ARGS)

test-slow: $(READY) ## the slow tests
	$(PYTEST) tests -n auto --dist worksteal -m "slow and not gpu and not timed" $(ARGS)

test-timed: $(READY) ## the tests that assert on time, one after the other
	$(PYTEST) tests -n 0 -m "timed and not gpu" $(ARGS)

fuzz: $(READY) ## 50,000 random programs, stock against fused, on all cores; goes on where it was stopped
	OMP_NUM_THREADS=1 $(PYTHON) -m fusion_passes.testing.fuzz --programs 50000 --record benchmarks/results $(ARGS)

test-gpu: $(READY) ## the tests that need a CUDA card; recorded in benchmarks/results/test-gpu-<card>.json
	$(PYTEST) tests -m gpu --record benchmarks/results $(ARGS)

sanitize-gpu: $(READY) ## the GPU tests of kernels and ops under compute-sanitizer; recorded in benchmarks/results
	$(PYTHON) tests/sanitize.py --record benchmarks/results $(ARGS)

lint: $(READY) ## ruff: format and lint
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

format: $(READY) ## rewrite the files as `make lint` wants them
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

types: $(READY) ## mypy, strict on the package
	$(PYTHON) -m mypy

demo: $(READY) ## show what the passes do to an unmodified Hugging Face Llama
	$(PYTHON) -m fusion_passes explain examples/llama_fp8.py

bench: $(READY) ## run the benchmarks (needs a CUDA card) and write their figures where they are kept
	$(PYTHON) benchmarks/attention_quant.py --suite target --record benchmarks/results
	$(PYTHON) benchmarks/attention_quant.py --level kernel --suite spread --record fusion_passes/measured
	$(PYTHON) benchmarks/kv_attention.py --sections decode prefill --record benchmarks/results
	$(PYTHON) benchmarks/kv_attention.py --sections rope_write quantization --record fusion_passes/measured
	$(PYTHON) benchmarks/decode.py --record benchmarks/results
	$(PYTHON) benchmarks/accuracy.py --record benchmarks/results --write-docs

docs: $(READY) ## build the pages of docs/ into site/
	$(PYTHON) -m pip install -q --disable-pip-version-check 'mkdocs>=1.6,<2'
	$(PYTHON) -m mkdocs build --strict --quiet

clean: ## remove the caches and build output, not .venv
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
