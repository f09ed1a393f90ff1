"""Token counters of speculative decoding. Pure host code, fed from results that SGLang copies to the host anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LOW_ACCEPT_LENGTH = 1.15
"""Mean tokens per round below which a drafter is as good as noise. A drafter that was wired with a wrong convention
(taps off by one, anchor misplaced) reaches about 1.1; a weak but sound one is above 1.3."""
LOW_ACCEPT_ROUNDS = 2000


class Counters:
    """Sums over decode rounds; a round is one request in one step.

    Attributes:
        steps: decode steps.
        plain_steps: those of them in which nothing was drafted.
        rounds: requests, summed over the steps.
        drafted: draft tokens that the drafter proposed.
        copied: draft tokens that presets proposed.
        verified: draft tokens that went through the target, whoever proposed them.
        accepted: draft tokens that the target kept.
        copied_accepted: those of them that presets proposed.
        committed: tokens gained: accepted drafts and one correction or bonus token per round.
        verified_at, accepted_at: the drafter's by position in the block, position 0 first.
    """

    def __init__(self, gamma: int) -> None:
        self.steps = self.plain_steps = self.rounds = self.drafted = self.verified = self.accepted = 0
        self.copied = self.copied_accepted = 0
        self.verified_at = [0] * gamma
        self.accepted_at = [0] * gamma

    def record(
        self,
        draft_lens: Sequence[int],
        verify_lens: Sequence[int],
        accept_lens: Sequence[int],
        copied_lens: Sequence[int],
    ) -> None:
        """Add one step.

        Args:
            draft_lens: drafts that the drafter proposed per request.
            verify_lens: drafts verified per request.
            accept_lens: drafts accepted per request (bonus not included).
            copied_lens: drafts that presets proposed per request, 0 where the drafter was asked.
        """
        self.steps += 1
        self.plain_steps += not any(draft_lens) and not any(copied_lens)
        self.rounds += len(verify_lens)
        self.drafted += sum(draft_lens)
        self.verified += sum(verify_lens)
        self.accepted += sum(accept_lens)
        for verified, accepted, copied in zip(verify_lens, accept_lens, copied_lens, strict=True):
            if copied:
                self.copied += copied
                self.copied_accepted += accepted
                continue
            for position in range(verified):
                self.verified_at[position] += 1
                self.accepted_at[position] += position < accepted

    @property
    def committed(self) -> int:
        """Tokens gained, bonus included."""
        return self.accepted + self.rounds

    @property
    def accept_length(self) -> float | None:
        """Mean tokens per round, bonus included; None before the first round."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def looks_miswired(self) -> bool:
        """Whether enough drafts were verified to say that the drafter does not predict this target."""
        rounds = self.verified_at[0]
        accepted = self.accepted - self.copied_accepted
        return rounds >= LOW_ACCEPT_ROUNDS and (accepted + rounds) / rounds < LOW_ACCEPT_LENGTH

    def report(self) -> dict[str, Any]:
        """JSON form. ``survival``: share of verified drafts accepted through that position, None where none was."""
        return {
            "steps": self.steps,
            "plain_steps": self.plain_steps,
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "copied_tokens": self.copied,
            "copied_accepted_tokens": self.copied_accepted,
            "verified_tokens": self.verified,
            "accepted_tokens": self.accepted,
            "committed_tokens": self.committed,
            "accept_length": self.accept_length,
            "survival": [a / v if v else None for a, v in zip(self.accepted_at, self.verified_at, strict=True)],
        }

    def __str__(self) -> str:
        length = self.accept_length
        return (
            f"drafted {self.drafted}, verified {self.verified}, accepted {self.accepted}, committed {self.committed}, "
            f"accept length {'-' if length is None else format(length, '.2f')}"
        )
