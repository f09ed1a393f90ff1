"""Makes the bundled drafter of SmolLM2-135M-Instruct from nothing but the target.

    python -m sglang_dspark.tools.train.recipes.smollm2_135m make --output DIR [--variant NAME] [--write-minutes M] ...
    python -m sglang_dspark.tools.train.recipes.smollm2_135m measure --draft DIR PROMPTS.jsonl ...

``make`` writes prompts, texts and drafter to DIR/part-000, and goes on where an earlier run stopped; both stages end by
the clock. ``--write-minutes 0`` writes no further texts, so that another variant is trained on the same ones, and
``--train-minutes 0`` trains nothing. On a GPU one part is enough. On a CPU, where an hour gives less, ``--part 1``,
``--part 2`` and so on write other texts, each in a folder of its own, and ``--init`` names the drafter of the part
before. ``measure`` prints accept lengths on the first prompts of each file, in float32.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.corpus import Corpus, generate, invent_prompts
from sglang_dspark.tools.train.initial_drafter import InitialDrafter
from sglang_dspark.tools.train.measure import measure, measured_texts, table
from sglang_dspark.tools.train.prompt_format import PromptFormat
from sglang_dspark.tools.train.recipes.seed_prompts import MATH_ENDINGS, openings, templated
from sglang_dspark.tools.train.reports import StepReport
from sglang_dspark.tools.train.rows import CorpusRow, StoredRow, keep_states, kept_bytes, stored_states
from sglang_dspark.tools.train.server_writer import OwnServerWriter
from sglang_dspark.tools.train.target import Target, stop_ids_of
from sglang_dspark.tools.train.text_writer import InProcessWriter, TextWriter
from sglang_dspark.tools.train.trainer import Trainer
from transformers import AutoConfig

from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of, write_text_whole
from sglang_dspark.tools.prompts import read_prompts

TARGET_DIR = Path(".cache/smollm2-135m-instruct")

TAP_IDS = (1, 14, 27)
SEED = 42
# Between the seeds of two parts; each of a part's shards takes one.
PART_SEEDS = 10_000
# Prompts per domain: (templated, openings that the target completes). What does not fit the time is left out evenly.
PROMPT_COUNTS = {"math": (3000, 16_000), "code": (1500, 14_000), "chat": (6000, 36_000)}
INVENTING_TEMPERATURES = (0.7, 1.0)
# Of the time for texts.
INVENTING_SHARE = 0.25
# Temperatures of the answers and their shares: mostly the text that greedy decoding will meet again.
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)
ANSWER_SHARES = (0.7, 0.2, 0.1)
MAX_INVENTED_LEN = 128
MAX_PROMPT_LEN = 256
MAX_ANSWER_LEN = 256
# Texts per shard, and openings per batch; and requests at the server at a time.
BATCH_SIZE = 8192
CONCURRENCY = 512
DRAFT_VOCABULARY = 12288
# Of the free memory of a GPU, for the states of the texts.
STATES_SHARE = 0.6
HELD_OUT_ROWS = 96
MEASURED_PROMPTS = 40
MEASURED_TOKENS = 128

CONFIG = TrainConfig(
    target_layer_ids=TAP_IDS,
    mask_token_id=16,  # <empty_output>, which neither the chat template nor the target's answers use
    block_size=5,
    num_layers=2,
    intermediate_size=1024,
    markov_rank=32,
    batch_rows=128,
    anchors_per_row=40,
    loss_vocab=DRAFT_VOCABULARY,
    loss_vocab_sampled=2048,
    draft_vocabulary=DRAFT_VOCABULARY,
    steps=10**8,  # the clock ends the run
    max_minutes=5.0,
    learning_rate=1.5e-3,
    markov_lr_scale=6.0,
    seed=SEED,
    device="cuda",
    compute_dtype="bfloat16",
    log_every=100,
)
# What a step on a CPU can carry.
CPU_CHANGES: dict[str, Any] = {
    "device": "cpu",
    "batch_rows": 4,
    "anchors_per_row": 32,
    "loss_vocab": 3072,
    "loss_vocab_sampled": 512,
    "learning_rate": 1e-3,
    "markov_lr_scale": 10.0,
}
CPU_BATCH_SIZE = 256
# Of the prompts of a part on a GPU.
CPU_PROMPTS_SHARE = 1 / 16
# Shapes that were tried; the bundled drafter is "base", and "dflash" the same as a plain DFlash drafter, without heads.
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "deep": {"num_layers": 3},
    "rank64": {"markov_rank": 64},
    "grown": {"num_layers": 3, "markov_rank": 64},
    "block7": {"block_size": 7},
    "dflash": {"sample_from_anchor": False, "markov_rank": 0, "confidence_head": False},
}

Say = Callable[[str], None]


def load_target(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Target:
    """The target on the GPU, where there is one."""
    return Target.from_pretrained(folder, TAP_IDS, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def text_writer(folder: Path) -> Iterator[TextWriter]:
    """An SGLang server of the target on the GPU where there is one, else the target in this process."""
    if not torch.cuda.is_available():
        yield InProcessWriter(load_target(folder), keep_states=True)
        return
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    with OwnServerWriter(str(folder), "cuda", "bfloat16", stop_ids_of(folder), vocab_size, CONCURRENCY) as writer:
        yield writer


def write_prompts(
    writer: TextWriter, prompt_format: PromptFormat, path: Path, seed: int, seconds: float, say: Say
) -> None:
    """Collect the training prompts in `path`, all domains mixed; inventing ends after about `seconds`.

    Prompts of the parts beside it are left out: what one part holds out, no other one trains on.
    """
    if path.exists():
        return
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    size = _batch_size()
    started = time.perf_counter()
    counts = _prompt_counts()
    prompts = {domain: templated(domain, counts[domain][0], seed) for domain in counts}
    for domain, temperature, chunk in _inventing_jobs(size, seed):
        if time.perf_counter() - started > seconds:
            say(f"inventing ended by the clock before {domain} at temperature {temperature}")
            break
        invented = invent_prompts(
            writer,
            prompt_format,
            chunk,
            max_new_tokens=MAX_INVENTED_LEN,
            temperature=temperature,
            batch_size=size,
            generator=generator,
        )
        if domain == "math":
            invented = [turn + rng.choice(MATH_ENDINGS) for turn in invented]
        prompts[domain] += invented
        say(f"{len(invented)} of {len(chunk)} {domain} prompts invented at temperature {temperature}")
    known = {row["prompt"] for other in path.parent.parent.glob("part-*/prompts.jsonl") for row in _json_lines(other)}
    rows = [
        {"prompt": prompt, "domain": domain, "temperature": rng.choices(ANSWER_TEMPERATURES, ANSWER_SHARES)[0]}
        for domain, found in prompts.items()
        for prompt in dict.fromkeys(found)
        if prompt not in known
    ]
    rng.shuffle(rows)
    write_text_whole(path, "".join(json.dumps(row) + "\n" for row in rows))


def _inventing_jobs(size: int, seed: int) -> Iterator[tuple[str, float, list[str]]]:
    """Domain, temperature and openings of batches of at most `size`, the domains in turn."""
    per_domain = []
    for domain, (_, count) in _prompt_counts().items():
        found = openings(domain, count, seed)
        jobs = [
            (domain, INVENTING_TEMPERATURES[i % len(INVENTING_TEMPERATURES)], found[start : start + size])
            for i, start in enumerate(range(0, count, size))
        ]
        per_domain.append(jobs)
    for turn in zip_longest(*per_domain):
        yield from (job for job in turn if job is not None)


def write_corpus(
    writer: TextWriter,
    prompt_format: PromptFormat,
    prompts_path: Path,
    folder: Path,
    seed: int,
    seconds: float,
    say: Say,
) -> None:
    """Let the target answer the prompts for about `seconds`; texts go to shards in `folder`."""
    rows = _json_lines(prompts_path)
    encoded = [(prompt_format.encode(row["prompt"]), row["temperature"]) for row in rows]
    prompts, temperatures = zip(*(row for row in encoded if len(row[0]) <= MAX_PROMPT_LEN), strict=True)
    say(f"{len(prompts)} prompts to answer")
    started = time.perf_counter()
    generate(
        writer,
        prompts,
        temperatures,
        folder,
        max_new_tokens=MAX_ANSWER_LEN,
        batch_size=_batch_size(),
        seed=seed,
        seconds=seconds,
        on_shard=lambda done, total: say(f"shard {done} of {total}, {time.perf_counter() - started:.0f} s"),
    )


def load_corpus(target: Target, folder: Path, say: Say) -> tuple[Corpus, Corpus]:
    """Texts to train on and texts held out, both with the target's states."""
    rows: list[CorpusRow] = [row for row in Corpus.load(folder).rows if len(row.input_ids) - row.prompt_len > 1]
    random.Random(SEED).shuffle(rows)
    if len(rows) <= HELD_OUT_ROWS:
        raise ConfigError(
            f"{folder} has {len(rows)} texts, of which {HELD_OUT_ROWS} are held out; raise --write-minutes"
        )
    started = time.perf_counter()
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # what decoding has left
        free, _ = torch.cuda.mem_get_info(target.device)
        fitting = int(len(rows) * min(1.0, STATES_SHARE * free / kept_bytes(target, rows)))
        say(f"{fitting} of {len(rows)} texts fit the memory with their states")
        rows = rows[:fitting]
    if not all(isinstance(row, StoredRow) for row in rows):
        rows = keep_states(target, rows, batch_tokens=65_536 if target.device.type == "cuda" else 4096)
    corpus, held_out = Corpus(rows[:-HELD_OUT_ROWS]), Corpus(rows[-HELD_OUT_ROWS:])
    say(f"{len(corpus)} texts, {corpus.num_answer_tokens} answer tokens; states took {_since(started)}")
    return corpus, held_out


def train(
    target: Target,
    corpus: Corpus,
    held_out: Corpus,
    folder: Path,
    config: TrainConfig,
    say: Say,
    init: Path | None = None,
) -> Trainer:
    """Train in `folder`, from the drafter `init` on; the checkpoint with its vocabulary is in ``folder/draft``."""
    first = None if init is None else InitialDrafter.load(str(init))
    trainer = Trainer(config, target, corpus, held_out, folder, stored_states, first)
    trainer.run(lambda report: say(_line(report)))
    return trainer


def variant_config(variant: str, minutes: float, device: str) -> TrainConfig:
    """Settings of a variant on this kind of device."""
    changes = VARIANTS[variant] | ({} if device == "cuda" else CPU_CHANGES)
    return replace(CONFIG, max_minutes=minutes, **changes)


def measure_drafters(target_dir: Path, drafters: Sequence[Path], files: Sequence[Path], say: Say) -> dict[str, Any]:
    """Drafter -> results of `measure` on the first prompts of each file; the target in float32."""
    target = load_target(target_dir, torch.float32)
    prompt_format = PromptFormat.from_pretrained(target_dir)
    models = {folder: load_draft_model(folder, dtype=torch.float32, device=str(target.device)) for folder in drafters}
    texts = measured_texts(
        target,
        InProcessWriter(target),
        {path.stem: list(map(prompt_format.encode, read_prompts(path, MEASURED_PROMPTS))) for path in files},
        max_new_tokens=MEASURED_TOKENS,
        block_size=max(model.config.gamma for model in models.values()),
        seed=SEED,
    )
    results = {}
    for folder, model in models.items():
        model.bind_target(target.embed_weight, target.lm_head_weight)
        ids = load_token_ids(folder, target.vocab_size)
        results[str(folder)] = measure(model, ids, target, texts, max_new_tokens=MEASURED_TOKENS, seed=SEED)
        say(f"{folder}\n{table(results[str(folder)])}")
    return results


def _prompt_counts() -> dict[str, tuple[int, int]]:
    share = 1 if torch.cuda.is_available() else CPU_PROMPTS_SHARE
    return {
        domain: (int(filled * share), int(invented * share)) for domain, (filled, invented) in PROMPT_COUNTS.items()
    }


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(path.read_text(encoding="utf-8"))]


def _batch_size() -> int:
    return BATCH_SIZE if torch.cuda.is_available() else CPU_BATCH_SIZE


def _since(started: float) -> str:
    return f"{time.perf_counter() - started:.0f} s"


def _line(report: StepReport) -> str:
    rates = " ".join(f"{rate:.3f}" for rate in report.acceptance)
    kind = "held out" if report.held_out else "training"
    state = f"loss {report.loss:.3f}  tau {report.tau:.3f}  accept {rates}"
    return f"step {report.step:6d}  {kind}  {state}  {report.seconds:.0f} s"


def main(arguments: Sequence[str]) -> None:
    """Run one of the commands of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make")
    make.add_argument("--output", type=Path, required=True)
    make.add_argument("--variant", choices=VARIANTS, default="base")
    make.add_argument("--write-minutes", type=float, default=4.0)
    make.add_argument("--train-minutes", type=float, default=5.0)
    make.add_argument("--part", type=int, default=0, help="number of the texts to write and train on")
    make.add_argument("--init", type=Path, help="drafter to start from, such as the bundled one of an earlier release")
    measuring = commands.add_parser("measure")
    measuring.add_argument("--draft", type=Path, action="append", required=True)
    measuring.add_argument("files", type=Path, nargs="+")
    for command in (make, measuring):
        command.add_argument("--target", type=Path, default=TARGET_DIR)
    options = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(text, flush=True)

    if options.command == "measure":
        measure_drafters(options.target, options.draft, options.files, say)
        return
    prompt_format = PromptFormat.from_pretrained(options.target)
    folder, seed = options.output / f"part-{options.part:03d}", SEED + PART_SEEDS * options.part
    prompts, texts = folder / "prompts.jsonl", folder / "corpus"
    seconds = 60 * options.write_minutes
    with text_writer(options.target) as writer:
        write_prompts(writer, prompt_format, prompts, seed, INVENTING_SHARE * seconds, say)
        write_corpus(writer, prompt_format, prompts, texts, seed, (1 - INVENTING_SHARE) * seconds, say)
    if not options.train_minutes:
        return
    target = load_target(options.target)
    config = variant_config(options.variant, options.train_minutes, target.device.type)
    if options.init is not None:
        config = replace(config, draft_vocabulary=0)  # that of the drafter to start from
    corpus, held_out = load_corpus(target, texts, say)
    train(target, corpus, held_out, folder / options.variant, config, say, options.init)


if __name__ == "__main__":
    main(sys.argv[1:])
