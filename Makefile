# Every target works on a fresh machine with Python 3.11 or 3.12, gcc and make.
PYTHON ?= python3
VENV := .venv
RUN := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NPROC=1 $(VENV)/bin/python
SERVE_RUN = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NPROC=1 $(SERVE)/bin/python
DEVICE_PYTHON ?= $(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,$(PYTHON))
BUNDLES ?= bundles
DEMO := $(BUNDLES)/demo
FULL := $(BUNDLES)/qwen3-32b+1.7b-tp32-k7
DEMO_PAIR := --target demo/target --draft demo/draft --checkpoint demo/target --draft-checkpoint demo/draft

SERVE := .venv-serve
PORT ?= 8000
SOAK ?= 300

.PHONY: build test check bench device-check serve serve-test install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt setuptools wheel
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch==2.13.0
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

build: install
	$(RUN) -m compile.build --tp 32 --k 7 --out $(FULL)
	$(RUN) -m compile.build $(DEMO_PAIR) --tp 1 --k 7 --batch 1 --max-len 512 --dtype fp32 --out $(DEMO)
	$(RUN) -m model.generate --bundle $(DEMO) --compare --max-new-tokens 200 --prompt "Count from 1 to 100: 1, 2, 3,"
	@echo $(DEMO)

# the server's own environment: vLLM pins what the rest leaves open
$(SERVE)/.installed: pyproject.toml constraints-serve.txt
	$(PYTHON) -m venv $(SERVE)
	$(SERVE)/bin/python -m pip install -q -c constraints-serve.txt setuptools wheel
	$(SERVE)/bin/python -m pip install -q -c constraints-serve.txt torch==2.13.0
	$(SERVE)/bin/python -m pip install -q -c constraints-serve.txt -e '.[serve]' filelock pytest
	touch $@

$(BUNDLES)/demo-b4/manifest.json: $(SERVE)/.installed
	$(SERVE_RUN) -m compile.build $(DEMO_PAIR) --tp 1 --k 7 --batch 4 --max-len 256 --dtype fp32 --out $(BUNDLES)/demo-b4

serve: $(BUNDLES)/demo-b4/manifest.json
	@echo "when it is ready: curl http://127.0.0.1:$(PORT)/v1/completions -H 'content-type: application/json'" \
	  "-d '{\"prompt\": \"Count from 1 to 10: 1, 2,\", \"max_tokens\": 40, \"temperature\": 0}'"
	OMP_NUM_THREADS=1 $(SERVE)/bin/vllm serve $(BUNDLES)/demo-b4 --host 127.0.0.1 --port $(PORT)

serve-test: $(BUNDLES)/demo-b4/manifest.json
	$(SERVE_RUN) -m pytest tests/serve
	$(SERVE_RUN) -m tests.serve.soak --bundle $(BUNDLES)/demo-b4 --requests $(SOAK)

test: install
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 NPROC=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal tests

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m nkisim.lint --strict nki_kernels

bench: install
	$(RUN) -m bench.speedup --out bench/results/speedup.json

# on a trn2 machine, with the Python that has the Neuron SDK; DEVICE_CHECK=--full compiles the 32B graphs too
device-check:
	$(DEVICE_PYTHON) -m compile.device_check --out device_check $(DEVICE_CHECK)

clean:
	rm -rf $(BUNDLES) $(VENV) $(SERVE)
