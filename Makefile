# Commands for users and developers. Each makes its own environment first; PYTHON names the interpreter to make it with.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3,$(shell $(python) -c 'print("$(python)")' 2>/dev/null)))
VENV := .venv
RUN := $(VENV)/bin/python

# What `make evidence` measures: the bundled pair, unless TARGET and DRAFT name another one.
SMOLLM2 := $(HOME)/.cache/sglang-dspark/smollm2-135m-instruct
PAIR = --target $(or $(TARGET),$(SMOLLM2)) --draft $(or $(DRAFT),sglang_dspark/drafters/smollm2-135m-instruct)
RESULTS ?= benchmarks/results

.DEFAULT_GOAL := help
.PHONY: help env demo doctor test check format evidence gpu lock clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

env: $(VENV)/.installed ## create .venv with everything that demo, tests and benchmarks need

# The stamp is newer than what the environment is made from, so this runs once, and again when they change.
$(VENV)/.installed: pyproject.toml constraints.txt .ci/make_env.py
	$(or $(PYTHON),$(error Python 3.11 is needed: make env PYTHON=/path/to/python3.11)) .ci/make_env.py
	@touch $@

demo: env ## SmolLM2-135M with and without DSPARK on this machine
	$(RUN) -m sglang_dspark demo

doctor: env ## is this installation able to serve?
	$(RUN) -m sglang_dspark doctor

test: env ## all tests that need no GPU
	$(RUN) -m pytest

check: env ## lint, formatting and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: env ## sort imports and format
	$(RUN) -m ruff check --select I --fix
	$(RUN) -m ruff format

evidence: env ## the long proofs and sweeps behind the README's numbers
	$(if $(PROMPTS),,$(error name JSONL files of {"turns": [text, ...]}: make evidence PROMPTS="a.jsonl b.jsonl"))
	$(if $(TARGET),,$(RUN) -c 'from sglang_dspark.demo.smollm2 import build; build("$(SMOLLM2)", progress=print)')
	$(RUN) benchmarks/identity.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/identity.json
	$(RUN) benchmarks/sweep_concurrency.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/sweep \
		--config plain --config auto --config static:5 --config static:4 --config static:3 --config static:2 \
		--config static:1 --concurrency 1,2,4,8,16 --max-tokens 96 --ignore-eos --rounds 6
	$(RUN) benchmarks/paired_ratio.py $(RESULTS)/sweep/sweep.csv --against-best auto@bfloat16
	$(RUN) benchmarks/plot_sweep.py $(RESULTS)/sweep/sweep.csv

# Attention and sampling of the plain server are those that DSPARK runs on, so that a ratio shows speculation alone.
GPU_FLAGS = --attention-backend triton --sampling-backend pytorch --max-running-requests 64

gpu: env ## with an NVIDIA GPU: kernel tests and benchmarks, a sweep of 1 to 64 users
	$(if $(PROMPTS),,$(error name JSONL files of {"turns": [text, ...]}: make gpu PROMPTS="a.jsonl b.jsonl"))
	$(if $(TARGET),,$(RUN) -c 'from sglang_dspark.demo.smollm2 import build; build("$(SMOLLM2)", progress=print)')
	$(RUN) -m pytest tests/kernels
	$(RUN) benchmarks/kernels/run.py --output $(RESULTS)/gpu/kernels.json
	$(RUN) benchmarks/sweep_concurrency.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/gpu/sweep --device cuda \
		--config plain --config auto --config static:5 --config static:3 --concurrency 1,4,16,64 --num-prompts 128 \
		--rounds 4 --server-flags "$(GPU_FLAGS)"
	$(RUN) benchmarks/plot_sweep.py $(RESULTS)/gpu/sweep/sweep.csv

lock: env ## write constraints.txt from the environment as it is
	@{ sed -n '/^#/p' constraints.txt; $(RUN) -m uv pip freeze --exclude-editable; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## remove the environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
