"""The first stage of a training run: prompts, and the target's answers to them, in one folder.

- ``settings.json``: the `TextPlan`
- ``prompts.jsonl``: one ``{"turns": [str, ...], "held_out": bool}`` per line, shuffled
- ``written``: an empty file, when all texts are there
- ``train-1.jsonl``, ``greedy-1.jsonl``, ``sampled-1.jsonl``: answers to first turns, and with 2, 3 and so on those
  to later ones; one ``{"input_ids": [int, ...], "prompt_len": int}`` per line

The target answers a later turn after its own answers to those before it, as it would be asked in use. Every answer is a
text of its own, because chat templates render earlier answers otherwise than the one being written. What is written is
not written again: an interrupted stage goes on after the last whole line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from dspark_training.conversations import read_conversations
from dspark_training.prompt_format import PromptFormat
from dspark_training.settings import TextPlan
from dspark_training.texts import Text
from dspark_training.writers import TextWriter
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import atomic_write_text, lines_of
from sglang_dspark.tools.prompts import Turns

_INVENTED_TOKENS = 256
# Tries per prompt asked for: some turns do not end, and some are invented twice.
_TRIES = 4
# Between the first seeds of two sets of texts, and of two turns.
_SEEDS_PER_SET = 1_000_000
_SEEDS_PER_TURN = 10_000

OnProgress = Callable[[str, int, int], None]
"""Called with (what is done, how many are, how many there will be)."""


@dataclass(frozen=True)
class Dialogue:
    """A conversation up to a turn of its user that the target has not answered yet."""

    turns: Turns  # of the user, also those that are still to come
    temperature: float
    prompt_ids: list[int]
    answers: tuple[str, ...] = ()

    def after(self, text: Text, stop_ids: frozenset[int], prompt_format: PromptFormat) -> Dialogue | None:
        """Return it with the answer in `text` and the next turn; None if there is none, or the answer was cut."""
        output = text.input_ids[text.prompt_len :].tolist()
        num_turns = len(self.answers) + 2
        if num_turns > len(self.turns) or output[-1] not in stop_ids:
            return None
        answers = (*self.answers, prompt_format.answer_text(output))
        prompt_ids = prompt_format.encode_conversation(self.turns[:num_turns], answers)
        return replace(self, prompt_ids=prompt_ids, answers=answers)


@dataclass(frozen=True)
class Texts:
    """The texts of the stage; every text has at least one anchor."""

    train: list[Text]
    greedy: list[Text]  # held out, temperature 0
    sampled: list[Text]  # held out, temperature 1


class TextFolder:
    """The folder of one plan, new or begun.

    Args:
        path: made if needed.
        plan: of a new folder. Texts that are there keep the plan that they were made with.
        given: fields that the user set, in which `plan` must agree with the texts that are there.

    Attributes:
        plan: what the texts are, or will be, made with.

    Raises:
        ConfigError: a field of `given` differs.
    """

    def __init__(self, path: Path, plan: TextPlan, given: frozenset[str]) -> None:
        self.path, self.plan = path, plan
        self._prompts = path / "prompts.jsonl"
        if self._prompts.exists():
            self.plan = msgspec.json.decode((path / "settings.json").read_bytes(), type=TextPlan)
            for name in sorted(given):
                ours, theirs = getattr(plan, name), getattr(self.plan, name)
                if ours != theirs:
                    raise ConfigError(
                        f"--{name.replace('_', '-')} {_shown(ours)}: the texts in {path} were begun with "
                        f"{_shown(theirs)}; drop the option to go on with them, or give another --corpus"
                    )

    @property
    def is_written(self) -> bool:
        """Return whether all texts are there."""
        return (self.path / "written").exists()

    def read_prompts(self) -> list[Turns]:
        """Read what the plan names, unless ``prompts.jsonl`` is there: then there is nothing to read.

        Raises:
            ConfigError: something cannot be read.
        """
        sources = () if self._prompts.exists() else self.plan.prompts
        return [turns for source in sources for turns in read_conversations(source)]

    def write(
        self, given: list[Turns], writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress
    ) -> None:
        """Make everything that is not there yet.

        Args:
            given: of `read_prompts`.

        Raises:
            ConfigError: there are too few prompts.
        """
        plan = self.plan
        if not self._prompts.exists():
            rows = self._collect(given, writer, prompt_format, on_progress)
            atomic_write_text(self.path / "settings.json", json.dumps(asdict(plan), indent=2) + "\n")
            atomic_write_text(self._prompts, "".join(json.dumps(row) + "\n" for row in rows))
        rows = _json_lines(self._prompts)
        train, held_out = ([tuple(row["turns"]) for row in rows if row["held_out"] is apart] for apart in (False, True))
        heats = plan.temperatures
        # A prompt that is answered again gets the next temperature.
        asked = {
            "train": [
                (train[i % len(train)], heats[(i + i // len(train)) % len(heats)])
                for i in range(plan.texts or len(train))
            ],
            "greedy": [(turns, 0.0) for turns in held_out],
            "sampled": [(turns, 1.0) for turns in held_out],
        }
        for number, (name, conversations) in enumerate(asked.items()):
            dialogues = [Dialogue(turns, heat, prompt_format.encode(turns[0])) for turns, heat in conversations]
            for turn in count(1):
                # Longest first: similar lengths waste little, and what does not fit the memory fails at once.
                dialogues.sort(key=lambda dialogue: -len(dialogue.prompt_ids))
                seed = plan.seed + _SEEDS_PER_SET * number + _SEEDS_PER_TURN * turn
                texts = self._answer(writer, dialogues, f"{name}-{turn}", seed, on_progress)
                answered = zip(dialogues, texts, strict=True)
                longer = [dialogue.after(text, writer.stop_ids, prompt_format) for dialogue, text in answered]
                dialogues = [d for d in longer if d is not None and len(d.prompt_ids) <= plan.max_prompt_tokens]
                if not dialogues:
                    break
        (self.path / "written").touch()

    def load(self) -> Texts:
        """Return the texts of a finished stage.

        Raises:
            ConfigError: no answer is long enough to train on.
        """
        sets = {}
        for name in ("train", "greedy", "sampled"):
            # An answer of one token has no anchor: nothing follows it.
            sets[name] = [
                text
                for path in sorted(self.path.glob(f"{name}-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
                for text in _texts_of(path)
                if len(text.input_ids) - text.prompt_len > 1
            ]
            if not sets[name]:
                raise ConfigError(
                    f"--corpus {self.path}: no answer in {name}-*.jsonl has two tokens; check the prompts and "
                    f"--max-tokens {self.plan.max_tokens}"
                )
        return Texts(**sets)

    def _answer(
        self, writer: TextWriter, dialogues: Sequence[Dialogue], name: str, seed: int, on_progress: OnProgress
    ) -> list[Text]:
        """Let the target answer what was said last, and keep the answers."""
        path = self.path / f"{name}.jsonl"
        kept = path.read_text(encoding="utf-8") if path.exists() else ""
        whole = kept[: kept.rfind("\n") + 1]
        if whole != kept:
            atomic_write_text(path, whole)
        done = whole.count("\n")
        with path.open("a", encoding="utf-8") as file:
            for start in range(done, len(dialogues), writer.batch):
                on_progress(f"writing {name}", start, len(dialogues))
                batch = dialogues[start : start + writer.batch]
                texts = writer.write(
                    [dialogue.prompt_ids for dialogue in batch],
                    [dialogue.temperature for dialogue in batch],
                    self.plan.max_tokens,
                    seed + start,
                )
                lines = ({"input_ids": text.input_ids.tolist(), "prompt_len": text.prompt_len} for text in texts)
                file.write("".join(json.dumps(line) + "\n" for line in lines))
                file.flush()
        on_progress(f"writing {name}", len(dialogues), len(dialogues))
        return _texts_of(path)

    def _collect(
        self, given: list[Turns], writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress
    ) -> list[dict[str, Any]]:
        plan, rng = self.plan, random.Random(self.plan.seed)
        found = given
        if plan.max_prompts is not None and len(found) > plan.max_prompts:
            found = rng.sample(found, plan.max_prompts)
        # Plain text has but one turn.
        found = [turns[: 1 if plan.raw else plan.max_turns] for turns in found]
        if plan.invent:
            found += [(prompt,) for prompt in self._invented(writer, prompt_format, on_progress)]
        distinct = dict.fromkeys(found)
        short = [turns for turns in distinct if 0 < len(prompt_format.encode(turns[0])) <= plan.max_prompt_tokens]
        rng.shuffle(short)
        held_out = short[: plan.held_out]
        # Conversations may begin alike and differ later. What they share is answered but once.
        seen = {turns[0] for turns in held_out}
        train = [turns for turns in short[plan.held_out :] if turns[0] not in seen]
        if not train:
            raise ConfigError(
                f"--held-out {plan.held_out}: of {len(found)} prompts, {len(short)} are distinct and have at most "
                f"{plan.max_prompt_tokens} tokens, of which none is left to train on that begins otherwise than a "
                "held-out one; give more --prompts, a larger --invent or --max-prompt-tokens, or a smaller --held-out"
            )
        rows = [(turns, True) for turns in held_out] + [(turns, False) for turns in train]
        return [{"turns": turns, "held_out": apart} for turns, apart in rows]

    def _invented(self, writer: TextWriter, prompt_format: PromptFormat, on_progress: OnProgress) -> list[str]:
        """Return up to `plan.invent` distinct prompts, fewer if the target has no more ideas."""
        plan = self.plan
        found: dict[str, None] = {}
        for tried in range(0, _TRIES * plan.invent, writer.batch):
            on_progress("inventing prompts", len(found), plan.invent)
            seed = plan.seed + _SEEDS_PER_SET * 3 + tried
            most_tokens = min(_INVENTED_TOKENS, plan.max_prompt_tokens)
            openings = [""] * min(writer.batch, plan.invent)
            found |= dict.fromkeys(invent_prompts(writer, prompt_format, openings, most_tokens, 1.0, seed))
            if len(found) >= plan.invent:
                break
        on_progress("inventing prompts", plan.invent, plan.invent)
        return list(found)[: plan.invent]


def invent_prompts(
    writer: TextWriter,
    prompt_format: PromptFormat,
    openings: Sequence[str],
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[str]:
    """Let the target write user turns: its chat template is opened at the user turn (the method of Magpie).

    Each opening is the text that a turn starts with, or empty. Turns that did not end within `max_new_tokens` are
    dropped.
    """
    ids = [prompt_format.open_user_turn(opening) for opening in openings]
    texts = writer.write(ids, [temperature] * len(ids), max_new_tokens, seed)
    prompts = []
    for text, opening in zip(texts, openings, strict=True):
        turn = prompt_format.invented_turn(text.input_ids[text.prompt_len :].tolist(), writer.stop_ids)
        if turn is not None:
            prompts.append((opening + turn).strip())
    return [prompt for prompt in prompts if prompt]


def _texts_of(path: Path) -> list[Text]:
    return [Text(torch.tensor(row["input_ids"]), row["prompt_len"]) for row in _json_lines(path)]


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(path.read_text(encoding="utf-8"))]


def _shown(value: object) -> str:
    """Return a value as the command line has it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
