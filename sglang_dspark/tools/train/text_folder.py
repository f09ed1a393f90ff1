"""The first stage of a training run: prompts, and the target's answers to them, in one folder.

- ``settings.json``: the `TextPlan`
- ``invented/*.json``: prompts that the target invented, one file per batch
- ``prompts.jsonl``: one ``{"turns": [str, ...], "held_out": bool}`` per line, shuffled
- ``train/``, ``held-out-greedy/``, ``held-out-sampled/``: shards, see `sglang_dspark.tools.train.corpus`; in each the
  answers to first turns, and in folders ``turn-2`` and so on those to later ones, each with the conversation before it

The target answers a later turn after its own answers to those before it, as it would be asked in use. Every answer is a
row of its own, because chat templates render earlier answers otherwise than the one being written.

Every file appears complete or not at all, and what is there is not made again.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of, write_text_whole
from sglang_dspark.tools.train.config import TextPlan
from sglang_dspark.tools.train.conversations import Turns, read_conversations
from sglang_dspark.tools.train.corpus import Corpus, generate, invent_prompts
from sglang_dspark.tools.train.prompt_format import PromptFormat
from sglang_dspark.tools.train.rows import CorpusRow
from sglang_dspark.tools.train.text_writer import TextWriter

_INVENTED_TOKENS = 256
# Tries per prompt asked for: some turns do not end, and some are invented twice.
_TRIES = 4

# One seed per batch; the three folders of texts and the invented prompts draw from ranges of their own.
_SEEDS_PER_JOB = 1_000_000

# Within the range of a job, of the answers to each turn.
_SEEDS_PER_TURN = 10_000

OnProgress = Callable[[str, int, int], None]
"""Called with (what is done, how many are, how many there will be)."""
OnTexts = Callable[[int, int], None]


@dataclass(frozen=True)
class Dialogue:
    """A conversation up to a turn of its user that the target has not answered yet."""

    turns: Turns  # of the user, also those that are still to come
    temperature: float
    prompt_ids: list[int]
    answers: tuple[str, ...] = ()

    def after(self, row: CorpusRow, stop_ids: frozenset[int], prompt_format: PromptFormat) -> Dialogue | None:
        """With the answer in `row` and the user's next turn; None where there is none, or the answer was cut."""
        output = row.input_ids[row.prompt_len :].tolist()
        num_turns = len(self.answers) + 2
        if num_turns > len(self.turns) or output[-1] not in stop_ids:
            return None
        answers = (*self.answers, prompt_format.answer_text(output))
        prompt_ids = prompt_format.encode_conversation(self.turns[:num_turns], answers)
        return replace(self, prompt_ids=prompt_ids, answers=answers)


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
                        f"--{name.replace('_', '-')} {_said(ours)}: the texts in {path} were begun with "
                        f"{_said(theirs)}; drop the option to go on with them, or give another --corpus"
                    )
            plan = replace(plan, **{name: getattr(begun, name) for name in bound})
        self.plan = plan

    def check_prompts(self) -> None:
        """Read what the prompts come from, if it has not been read: not after a model of gigabytes has been loaded.

        Raises:
            ConfigError: something cannot be read.
        """
        if not (self.path / "prompts.jsonl").exists():
            _ = self._given

    @cached_property
    def _given(self) -> list[Turns]:
        return [turns for source in self.plan.prompts for turns in read_conversations(source)]

    def write(self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress) -> None:
        """Make everything that is not there yet.

        Raises:
            ConfigError: there are too few prompts.
        """
        plan = self.plan
        write_text_whole(self.path / "settings.json", json.dumps(asdict(plan), indent=2) + "\n")
        conversations, held_out = self._conversations(writer, prompt_format, on_progress)
        heats = plan.temperatures
        # A prompt that is answered again gets the next temperature.
        train = [
            (conversations[i % len(conversations)], heats[(i + i // len(conversations)) % len(heats)])
            for i in range(plan.texts or len(conversations))
        ]
        jobs = {
            "train": ("writing texts", train),
            "held-out-greedy": ("held out, greedy", [(turns, 0.0) for turns in held_out]),
            "held-out-sampled": ("held out, sampled", [(turns, 1.0) for turns in held_out]),
        }
        for number, (name, (stage, asked)) in enumerate(jobs.items()):
            dialogues = [Dialogue(turns, heat, prompt_format.encode(turns[0])) for turns, heat in asked]
            for turn in count(1):
                # Longest first: similar lengths waste little, and what does not fit the memory fails at once.
                dialogues.sort(key=lambda dialogue: -len(dialogue.prompt_ids))
                folder = self.path / name if turn == 1 else self.path / name / f"turn-{turn}"
                said = stage if turn == 1 else f"{stage}, turn {turn}"
                seed = plan.seed + _SEEDS_PER_JOB * number + _SEEDS_PER_TURN * (turn - 1)
                self._answer(writer, dialogues, folder, seed, partial(on_progress, said))
                if all(len(dialogue.turns) == turn for dialogue in dialogues):
                    break
                answered = zip(dialogues, Corpus.load(folder).rows, strict=True)
                longer = [dialogue.after(row, writer.stop_ids, prompt_format) for dialogue, row in answered]
                dialogues = [d for d in longer if d is not None and len(d.prompt_ids) <= plan.max_prompt_tokens]
                if not dialogues:
                    break

    def _answer(
        self, writer: TextWriter, dialogues: Sequence[Dialogue], folder: Path, seed: int, on_texts: OnTexts
    ) -> None:
        """The target's answers to what was said last, as shards in `folder`."""
        plan = self.plan

        def on_shard(done: int, total: int) -> None:
            on_texts(min(done * plan.write_batch, len(dialogues)), len(dialogues))

        generate(
            writer,
            [dialogue.prompt_ids for dialogue in dialogues],
            [dialogue.temperature for dialogue in dialogues],
            folder,
            max_new_tokens=plan.max_tokens,
            batch_size=plan.write_batch,
            seed=seed,
            on_shard=on_shard,
        )

    def load(self) -> Texts:
        """The texts of a finished stage.

        Raises:
            ConfigError: no answer is long enough to train on.
        """
        train, greedy, sampled = (
            # An answer of one token has no anchor: nothing follows it.
            Corpus([row for row in self._rows(name) if len(row.input_ids) - row.prompt_len > 1])
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

    def _rows(self, name: str) -> list[CorpusRow]:
        """Answers to first turns, then to later ones."""
        later = sorted((self.path / name).glob("turn-*"), key=lambda folder: int(folder.name.removeprefix("turn-")))
        return [row for folder in (self.path / name, *later) for row in Corpus.load(folder).rows]

    def _conversations(
        self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress
    ) -> tuple[list[Turns], list[Turns]]:
        """What users say in the conversations to train on, and in those held out."""
        path = self.path / "prompts.jsonl"
        if not path.exists():
            rows = self._collect(writer, prompt_format, on_progress)
            write_text_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
        train: list[Turns] = []
        held_out: list[Turns] = []
        for line in lines_of(path.read_text(encoding="utf-8")):
            row = json.loads(line)
            # An earlier release had first turns alone.
            turns = row["turns"] if "turns" in row else [row["prompt"]]
            (held_out if row["held_out"] else train).append(tuple(turns))
        return train, held_out

    def _collect(
        self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress
    ) -> list[dict[str, Any]]:
        plan, rng = self.plan, random.Random(self.plan.seed)
        found = self._given
        if plan.max_prompts is not None and len(found) > plan.max_prompts:
            found = rng.sample(found, plan.max_prompts)
        found = [turns[: plan.answered_turns] for turns in found]
        if plan.invent:
            found += [(prompt,) for prompt in self._invented(writer, prompt_format, on_progress)]
        distinct = dict.fromkeys(found)
        short = [turns for turns in distinct if 0 < len(prompt_format.encode(turns[0])) <= plan.max_prompt_tokens]
        if len(short) <= plan.held_out:
            raise ConfigError(
                f"--held-out {plan.held_out}: of {len(found)} prompts, {len(short)} are distinct and have at most "
                f"{plan.max_prompt_tokens} tokens, which leaves none to train on; give more --prompts, a larger "
                "--invent or --max-prompt-tokens, or a smaller --held-out"
            )
        rng.shuffle(short)
        held_out = short[: plan.held_out]
        # Conversations may begin alike and differ later. What they share is answered but once.
        seen = {turns[0] for turns in held_out}
        train = [turns for turns in short[plan.held_out :] if turns[0] not in seen]
        if not train:
            raise ConfigError(
                f"--held-out {plan.held_out}: all of the {len(short)} conversations begin as a held-out one does, "
                "which leaves none to train on; give --prompts that begin otherwise, or a smaller --held-out"
            )
        rows = [(turns, True) for turns in held_out] + [(turns, False) for turns in train]
        return [{"turns": turns, "held_out": apart} for turns, apart in rows]

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


def _said(value: object) -> str:
    """As the command line has it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
