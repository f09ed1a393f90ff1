"""The first stage of a training run: prompts, and the target's answers to them, in one folder.

- ``settings.json``: the `TextPlan`
- ``invented/*.json``: prompts that the target invented, one file per batch
- ``prompts.jsonl``: one ``{"prompt": str, "held_out": bool}`` per line, shuffled
- ``train/``, ``held-out-greedy/``, ``held-out-sampled/``: shards, see `sglang_dspark.tools.train.corpus`

Every file appears complete or not at all, and what is there is not made again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of, write_text_whole
from sglang_dspark.tools.prompts import read_prompts
from sglang_dspark.tools.train.config import TextPlan
from sglang_dspark.tools.train.corpus import Corpus, generate, invent_prompts
from sglang_dspark.tools.train.prompt_format import PromptFormat
from sglang_dspark.tools.train.text_writer import TextWriter

_INVENTED_TOKENS = 256
# Tries per prompt asked for: some turns do not end, and some are invented twice.
_TRIES = 4

# One seed per batch; the three folders of texts and the invented prompts draw from ranges of their own.
_SEEDS_PER_JOB = 1_000_000

OnProgress = Callable[[str, int, int], None]
"""Called with (what is done, how many are, how many there will be)."""


@dataclass(frozen=True)
class Texts:
    """What the stage leaves behind; rows of `train` have at least one anchor."""

    train: Corpus
    greedy: Corpus  # held out, temperature 0
    sampled: Corpus  # held out, temperature 1


class TextFolder:
    """The folder of one plan, new or begun.

    Args:
        path: made if needed.
        plan: of a new folder. What texts were already made with stays as it was.
        insist: fields that the user set, in which `plan` must agree with the texts that are there.

    Attributes:
        plan: what the texts are, or will be, made with.

    Raises:
        ConfigError: a field of `insist` differs.
    """

    def __init__(self, path: Path, plan: TextPlan, insist: frozenset[str]) -> None:
        self.path = path
        settings = path / "settings.json"
        if settings.exists():
            begun = TextPlan.read(settings)
            bound = self._bound_fields()
            for name in sorted(bound & insist):
                ours, theirs = getattr(plan, name), getattr(begun, name)
                if ours != theirs:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} {ours}: the texts in {path} were begun with {theirs}; drop the "
                        "option to go on with them, or give another --corpus"
                    )
            plan = replace(plan, **{name: getattr(begun, name) for name in bound})
        self.plan = plan
        write_text_whole(settings, json.dumps(asdict(plan), indent=2) + "\n")

    def write(self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress) -> None:
        """Make everything that is not there yet.

        Raises:
            ConfigError: there are too few prompts.
        """
        prompts, held_out = self._prompts(writer, prompt_format, on_progress)
        plan = self.plan
        heats = plan.temperatures
        # A prompt that is answered again gets the next temperature.
        train = [
            (prompts[i % len(prompts)], heats[(i + i // len(prompts)) % len(heats)])
            for i in range(plan.texts or len(prompts))
        ]
        # Longest first: similar lengths waste little, and what does not fit the memory fails at once.
        train.sort(key=lambda row: -len(row[0]))
        jobs = {
            "train": ("writing texts", train),
            "held-out-greedy": ("held out, greedy", [(ids, 0.0) for ids in held_out]),
            "held-out-sampled": ("held out, sampled", [(ids, 1.0) for ids in held_out]),
        }
        for offset, (name, (stage, rows)) in enumerate(jobs.items()):

            def on_shard(done: int, total: int, stage: str = stage, rows: Sized = rows) -> None:
                on_progress(stage, min(done * plan.write_batch, len(rows)), len(rows))

            generate(
                writer,
                [ids for ids, _ in rows],
                [heat for _, heat in rows],
                self.path / name,
                max_new_tokens=plan.max_tokens,
                batch_size=plan.write_batch,
                seed=plan.seed + _SEEDS_PER_JOB * offset,
                on_shard=on_shard,
            )

    def load(self) -> Texts:
        """The texts of a finished stage.

        Raises:
            ConfigError: no answer is long enough to train on.
        """
        train, greedy, sampled = (
            # An answer of one token has no anchor: nothing follows it.
            Corpus([row for row in Corpus.load(self.path / name).rows if len(row.input_ids) - row.prompt_len > 1])
            for name in ("train", "held-out-greedy", "held-out-sampled")
        )
        for corpus, name in ((train, "training"), (greedy, "greedy held-out"), (sampled, "sampled held-out")):
            if not len(corpus):
                raise ConfigError(
                    f"--corpus {self.path}: no {name} answer has two tokens; check the prompts and --max-tokens "
                    f"{self.plan.max_tokens}"
                )
        return Texts(train, greedy, sampled)

    def _bound_fields(self) -> frozenset[str]:
        """Fields of the plan that what is there was made with: a first try that made nothing binds nobody."""
        if (self.path / "prompts.jsonl").exists():
            return frozenset(f.name for f in fields(TextPlan))
        if (self.path / "invented").exists():
            return frozenset({"max_prompt_tokens", "raw", "chat_template_kwargs", "write_batch", "seed"})
        return frozenset()

    def _prompts(
        self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts to train on, and of those held out."""
        path = self.path / "prompts.jsonl"
        if not path.exists():
            rows = self._collect_prompts(writer, prompt_format, on_progress)
            write_text_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        train: list[list[int]] = []
        held_out: list[list[int]] = []
        for line in lines_of(path.read_text(encoding="utf-8")):
            row = json.loads(line)
            (held_out if row["held_out"] else train).append(prompt_format.encode(row["prompt"]))
        return train, held_out

    def _collect_prompts(
        self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress
    ) -> list[dict[str, Any]]:
        plan = self.plan
        found = [prompt for file in plan.prompts for prompt in read_prompts(Path(file))]
        if plan.invent:
            found += self._invented(writer, prompt_format, on_progress)
        short = [p for p in dict.fromkeys(found) if 0 < len(prompt_format.encode(p)) <= plan.max_prompt_tokens]
        if len(short) <= plan.held_out:
            raise ConfigError(
                f"--held-out {plan.held_out}: of {len(found)} prompts, {len(short)} are distinct and have at most "
                f"{plan.max_prompt_tokens} tokens, which leaves none to train on; give more --prompts, a larger "
                "--invent or --max-prompt-tokens, or a smaller --held-out"
            )
        random.Random(plan.seed).shuffle(short)
        return [{"prompt": prompt, "held_out": i < plan.held_out} for i, prompt in enumerate(short)]

    def _invented(self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress) -> Sequence[str]:
        """Up to `plan.invent` distinct prompts, fewer where the target has no more ideas."""
        plan = self.plan
        found: dict[str, None] = {}
        size = min(plan.write_batch, plan.invent)
        for batch in range(math.ceil(_TRIES * plan.invent / size)):
            path = self.path / "invented" / f"{batch:05d}.json"
            if not path.exists():
                turns = invent_prompts(
                    writer,
                    prompt_format,
                    [""] * size,
                    max_new_tokens=min(_INVENTED_TOKENS, plan.max_prompt_tokens),
                    temperature=1.0,
                    batch_size=size,
                    generator=torch.Generator().manual_seed(plan.seed + _SEEDS_PER_JOB * 3 + batch),
                )
                write_text_whole(path, json.dumps(turns))
            found |= dict.fromkeys(json.loads(path.read_text(encoding="utf-8")))
            on_progress("inventing prompts", min(len(found), plan.invent), plan.invent)
            if len(found) >= plan.invent:
                break
        return list(found)[: plan.invent]
