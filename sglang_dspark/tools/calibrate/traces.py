"""Rounds of whole blocks, out of the traces that a server returns with its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from sglang_dspark.calibration.survival import Bools, Floats, Ints
from sglang_dspark.errors import ConfigError

Trace = Sequence[dict[str, Any] | None]
"""``meta_info["dspark_trace"]`` of an answer: one entry per output token, a round or null."""


@dataclass(frozen=True)
class BlockRounds:
    """Rounds whose whole block was verified.

    Attributes:
        logits: [n, gamma] float64, raw logits of the confidence head.
        accepted: [n] drafts accepted, 0 to gamma.
        prompt: [n] index of the prompt that each came from.
    """

    logits: Floats
    accepted: Ints
    prompt: Ints

    @classmethod
    def from_traces(cls, traces: Sequence[Trace], gamma: int) -> Self:
        """Collect the rounds of traces, one trace per prompt.

        Args:
            gamma: drafts of a whole block.

        Raises:
            ConfigError: there are none, or they have no confidence.
        """
        rounds = [(prompt, entry) for prompt, trace in enumerate(traces) for entry in trace if entry and entry["draft"]]
        whole = [(prompt, entry) for prompt, entry in rounds if entry["verified"] == len(entry["draft"]) == gamma]
        if not whole:
            raise ConfigError(
                f"none of {len(rounds)} rounds verified its whole block of drafts; start the server with "
                "--speculative-dspark-schedule static and without --speculative-dspark-verify-len, or switch it with "
                'POST /dspark/policy {"policy": "static"}'
            )
        return cls(
            np.array([round_confidence(entry) for _, entry in whole]),
            np.array([entry["accepted"] for _, entry in whole]),
            np.array([prompt for prompt, _ in whole]),
        )

    def split(self, num_prompts: int, held_out: float) -> tuple[Self, Self]:
        """Return ``(fit, held out)``: whole prompts, evenly spread over the file, always the same ones.

        Rounds of one answer resemble each other, so a split within an answer would test on what was fitted.

        Args:
            held_out: share of the prompts to hold out, between 0 and 1.

        Raises:
            ConfigError: one of the parts has no rounds.
        """
        quota = np.floor(np.arange(num_prompts + 1) * held_out)
        is_held_out = (np.diff(quota) > 0)[self.prompt]
        for part, rounds in (("fit", ~is_held_out), ("held-out", is_held_out)):
            if not rounds.any():
                raise ConfigError(
                    f"--held-out {held_out:g} of {num_prompts} prompts leaves no round in the {part} part; give more "
                    "prompts or another share"
                )
        return self._where(~is_held_out), self._where(is_held_out)

    def _where(self, mask: Bools) -> Self:
        return type(self)(self.logits[mask], self.accepted[mask], self.prompt[mask])


def round_confidence(entry: dict[str, Any]) -> list[float]:
    """Return the raw logits of a round, one per draft.

    Raises:
        ConfigError: it has none, or another number.
    """
    confidence = entry.get("confidence")
    if confidence is None:
        raise ConfigError(
            'the server\'s rounds have no "confidence": the drafter has no confidence head, so there is nothing to '
            "calibrate; serve a drafter with one (python -m sglang_dspark doctor says what a drafter has)"
        )
    if len(confidence) != len(entry["draft"]):
        raise ConfigError(
            f"a round has {len(confidence)} confidences for {len(entry['draft'])} drafts; update the server"
        )
    return list(confidence)
