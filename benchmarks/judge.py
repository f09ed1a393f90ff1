"""Judges the first difference of two greedy texts of one target: the rounding of another batch, or a fault?

Rows of another shape differ in the last bits of a float. So the target's choice may change where its two best tokens
are nearly tied, and nowhere else. A difference is explained if the two tokens are a near-tie in float32 at that prefix,
or if the target alone, in batches of the same size, writes the same token there. What follows it is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.25}
"""Gap of a near-tie, in units of the logits: in bfloat16 logits above 16 are multiples of 1/8 themselves."""
LEAK = 0.005
"""Share of wrong tokens that a comparison has to notice."""

Ids = Sequence[int]


@dataclass(frozen=True)
class Split:
    """The first difference of a text from the expected one.

    Attributes:
        gap: how far the lower one of the two tokens lies below the target's best logit, in float32; infinite if one
            text merely ends earlier.
        near_tie: whether that is a near-tie.
        emitted: whether the target alone has written this token there.
    """

    prompt: int
    position: int
    expected: int
    got: int
    gap: float
    near_tie: bool
    emitted: bool

    @property
    def explained(self) -> bool:
        """Return whether it is no fault."""
        return self.near_tie or self.emitted


class Judge:
    """The target in process, in float32.

    Args:
        near_tie: gaps below it are one.
    """

    def __init__(self, target: Path, device: str, near_tie: float) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device)
        self.near_tie = near_tie

    def splits(
        self,
        prompts: Sequence[Ids],
        expected: Sequence[Ids],
        texts: Sequence[Ids],
        plain: Sequence[Sequence[Ids]] = (),
    ) -> list[Split]:
        """Return the first differences of all texts.

        Args:
            plain: texts of the target alone to the same prompts, in batches of the same size; perhaps several.
        """
        return [
            self._split(index, prompts[index], expected[index], text, [own[index] for own in plain])
            for index, text in enumerate(texts)
            if list(text) != list(expected[index])
        ]

    def _split(self, index: int, prompt: Ids, expected: Ids, got: Ids, plain: Iterable[Ids]) -> Split:
        pairs = enumerate(zip(expected, got, strict=False))
        position = next((place for place, (a, b) in pairs if a != b), None)
        if position is None:
            emitted = any(list(own) == list(got) for own in plain)
            return Split(index, min(len(expected), len(got)), -1, -1, float("inf"), near_tie=False, emitted=emitted)
        ours, theirs = expected[position], got[position]
        logits = self._logits([*prompt, *expected[:position]])[-1]
        gap = float(logits.max() - logits[[ours, theirs]].min())
        emitted = any(list(own[: position + 1]) == [*expected[:position], theirs] for own in plain)
        return Split(index, position, ours, theirs, gap, gap < self.near_tie, emitted)

    def tie_share(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> float:
        """Return the share of a text's positions at which the target's two best tokens are a near-tie."""
        gaps = [gap for prompt, text in zip(prompts, texts, strict=True) for gap in self._gaps(prompt, text)]
        return sum(gap < self.near_tie for gap in gaps) / len(gaps)

    def _gaps(self, prompt: Ids, text: Ids) -> list[float]:
        best = self._logits([*prompt, *text])[len(prompt) - 1 : -1].topk(2).values
        gaps: list[float] = (best[:, 0] - best[:, 1]).tolist()
        return gaps

    @torch.inference_mode()
    def _logits(self, ids: Ids) -> torch.Tensor:
        logits: torch.Tensor = self._model(torch.tensor([list(ids)], device=self._model.device)).logits[0]
        return logits


def judged_tokens(texts: Sequence[Ids], splits: Sequence[Split]) -> int:
    """Return how many tokens were compared: those of every text up to its first difference."""
    ends = {split.prompt: split.position + 1 for split in splits}
    return sum(ends.get(index, len(text)) for index, text in enumerate(texts))


def power(tokens: int, tie_share: float, leak: float = LEAK) -> float:
    """Return the probability that a comparison notices a leak.

    The leak puts the runner-up in the place of a token, which is hardest to notice: where the two are a near-tie, it is
    excused.

    Args:
        tokens: compared.
        tie_share: of :meth:`Judge.tie_share`.
        leak: share of wrong tokens.
    """
    return 1 - float((1 - leak * (1 - tie_share)) ** tokens)
