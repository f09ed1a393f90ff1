# Commands for users and developers. Each makes its own environment first; PYTHON names the interpreter to make it with.
PYTHON ?= $(firstword $(foreach python,python3.11 python3.12 python3,$(shell $(python) -c 'print("$(python)")' 2>/dev/null)))
VENV := .venv
RUN := $(VENV)/bin/python
# What is not kept compiled is compiled by every process anew: a minute for each server.
unexport PYTHONDONTWRITEBYTECODE

# What `make evidence` measures: the bundled pair, unless TARGET and DRAFT name another one.
SMOLLM2 := $(HOME)/.cache/sglang-dspark/smollm2-135m-instruct
PAIR = --target $(or $(TARGET),$(SMOLLM2)) --draft $(or $(DRAFT),sglang_dspark/drafters/smollm2-135m-instruct)
# Not benchmarks/results, whose files the documents quote. A sweep refuses a folder with results of another commit.
RESULTS ?= results
SWEEP ?= $(RESULTS)/quick_sweep
# More options for sweep_concurrency.py, e.g. --num-prompts 8.
SWEEP_FLAGS ?=

.DEFAULT_GOAL := help
.PHONY: help env demo doctor unit test thorough check format sweep evidence gpu gpu15 lock next clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

# One make at a time: a second one waits for the first.
env: ## create .venv with everything that demo, tests and benchmarks need
	@exec 9<Makefile; flock --nonblock 9 || { echo "another make is making $(VENV); waiting for it"; flock 9; }; \
		$(MAKE) --silent --no-print-directory $(VENV)/.installed

# uv needs less than half of pip's time, but it does not read pip's configuration, which may name the only index that can
# be reached.
INSTALL = install --constraint constraints.txt --editable ".[demo,train,test,bench,dev]"

# The stamp is newer than what the environment is made from, so this runs once, and again when they change. Python compiles
# what it imports; to compile all that is installed takes as long as to install it.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "1 of 3: a new environment in $(VENV)"
	$(or $(PYTHON),$(error Python 3.11 is needed: make env PYTHON=/path/to/python3.11)) -m venv $(VENV)
	@echo "2 of 3: SGLang, torch and what tests and benchmarks need: 11 GB, which takes minutes"
	$(RUN) -m pip install --quiet --no-compile --constraint constraints.txt uv
	$(RUN) -m uv pip $(INSTALL) --python $(RUN) \
		|| { echo "uv cannot install them, see above; pip tries, which takes longer"; $(RUN) -m pip $(INSTALL) --no-compile; }
	@echo "3 of 3: servers without a GPU"
	$(RUN) -m sglang_dspark enable-cpu
	@touch $@

demo: env ## four minutes: SmolLM2-135M with and without DSPARK, side by side on this machine
	$(RUN) -m sglang_dspark demo

doctor: env ## is this installation able to serve?
	$(RUN) -m sglang_dspark doctor

# Tests that share a server, or else a file, run in one process one after another.
PYTEST = $(RUN) -m pytest --numprocesses 2 --dist loadgroup --no-loadscope-reorder

unit: env ## the fast tests: no server, no interpreted kernel, nothing marked slow
	$(PYTEST) --ignore tests/server -m "not slow and not thorough"

test: env ## all tests that need no GPU, except the long proofs of `make thorough`
	$(PYTEST) -m "not thorough"

# When each of them has last passed; CI runs none.
PASSED = benchmarks/results/thorough.json

thorough: env ## tests that show in several processes what faster ones show
	$(PYTEST) -m thorough --passed=$(PASSED)

check: env ## lint, formatting and types
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: env ## sort imports and format
	$(RUN) -m ruff check --select I --fix
	$(RUN) -m ruff format

# Fails with a sentence where no prompt file is named; builds the bundled target where no other one is.
PREPARE = $(if $(PROMPTS),$(if $(TARGET),@:,$(RUN) -c 'from sglang_dspark.tools.demo import build; \
	build("$(SMOLLM2)", progress=print)'),$(error name JSONL files of {"turns": [text, ...]}: make $@ PROMPTS="a.jsonl b.jsonl"))

sweep: env ## five minutes: plain, off and auto at 1 and 4 users on your prompts, with a report
	$(PREPARE)
	$(RUN) benchmarks/sweep_concurrency.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(SWEEP) \
		--config plain --config off --config auto --concurrency 1,4 --num-prompts 4 --max-tokens 64 --rounds 2 $(SWEEP_FLAGS)
	$(RUN) benchmarks/report.py $(SWEEP)

evidence: env ## the long proofs and sweeps behind the README's numbers
	$(PREPARE)
	$(PYTEST) -m thorough --passed=$(PASSED)
	@mkdir -p $(RESULTS)
	$(RUN) benchmarks/mutants.py
	$(RUN) benchmarks/kernels/compile_for.py --output $(RESULTS)/compiled.json
	$(RUN) benchmarks/identity.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/identity.json
	$(RUN) benchmarks/identity.py $(PAIR) $(PROMPTS:%=--prompts %) --only user --dtype bfloat16 \
		--output $(RESULTS)/identity_bfloat16.json
	@mkdir -p $(RESULTS)/same_bits
	$(RUN) benchmarks/same_bits.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/same_bits/float32.json
	$(RUN) benchmarks/same_bits.py $(PAIR) $(PROMPTS:%=--prompts %) --dtype bfloat16 \
		--output $(RESULTS)/same_bits/bfloat16.json
	$(RUN) benchmarks/same_bits.py $(PAIR) $(PROMPTS:%=--prompts %) --dtype bfloat16 \
		--server-flags --enable-deterministic-inference --output $(RESULTS)/same_bits/bfloat16_deterministic.json
	$(RUN) benchmarks/sweep_concurrency.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/sweep \
		--config plain --config off --config auto --config static:5 --config static:4 --config static:3 \
		--config static:2 --config static:1 --concurrency 1,2,4,8,16 --max-tokens 96 --ignore-eos --rounds 8 $(SWEEP_FLAGS)
	$(RUN) benchmarks/report.py $(RESULTS)/sweep

gpu: env ## with an NVIDIA GPU: its checks and sweeps in half an hour; GPU_FLAGS="--only tests"
	$(PREPARE)
	$(RUN) benchmarks/gpu.py $(PAIR) $(PROMPTS:%=--prompts %) --output $(RESULTS)/gpu $(GPU_FLAGS)

QUARTER = paths,prompts,engines
gpu15: ## in a quarter of an hour on an NVIDIA GPU: what none has run; then QUARTER=chat,long,streams, then mathematics,training, then bits
	$(MAKE) gpu RESULTS=$(RESULTS) GPU_FLAGS="--only $(QUARTER) $(GPU_FLAGS)"

lock: env ## write constraints.txt from the environment as it is
	@{ sed -n '/^#/p' constraints.txt; $(RUN) -m pip freeze --exclude-editable; } > constraints.new
	@mv constraints.new constraints.txt

# Another release keeps all other versions that it can work with. NEXT_INSTALL has more options of uv, such as --override
# with a file of requirements.
NEXT := .venv-next
NEXT_TESTS ?= tests/engine tests/server
next: ## try another SGLang, e.g. PRE=0.5.24rc1, in an environment of its own; $(RESULTS)/next_PRE.json says what broke
	$(if $(PRE),,$(error name the release of SGLang to try: make next PRE=0.5.24rc1))
	@$(MAKE) --no-print-directory env VENV=$(NEXT)
	$(NEXT)/bin/python -m uv pip install --python $(NEXT)/bin/python pytest-timeout sglang==$(PRE) $(NEXT_INSTALL) \
		|| $(NEXT)/bin/python -m pip install pytest-timeout sglang==$(PRE)
	-$(NEXT)/bin/python -m sglang_dspark doctor --sglang --hooks
	@mkdir -p $(RESULTS)
	$(NEXT)/bin/python benchmarks/next_sglang.py --output $(RESULTS)/next_$(PRE).json $(NEXT_TESTS)

clean: ## remove the environment and caches
	rm -rf $(VENV) $(NEXT) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
