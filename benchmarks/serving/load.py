"""How hard the servers of a sweep are driven: a number of users, or requests that arrive by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click
import numpy as np

DEFAULT_CONCURRENCY = "1,2,4,8"


@dataclass(frozen=True)
class Load:
    """One load point: exactly one of the two is given.

    Attributes:
        concurrency: closed loop: users, each of whom sends the next prompt when the last answer is complete. The load
            follows the server: a slow one is asked less.
        rate: open loop: requests per second that arrive as a Poisson process, however slow the server is.
    """

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        """Return what tables call it, e.g. ``8 users`` or ``2 req/s``."""
        return load_label(self.concurrency, self.rate)


def load_label(concurrency: int | None, rate: float | None) -> str:
    """Return what tables call a load point."""
    if rate is not None:
        return f"{rate:g} req/s"
    return f"{concurrency} user{'' if concurrency == 1 else 's'}"


def loads(concurrencies: Sequence[int], rates: Sequence[float]) -> list[Load]:
    """Load points in the order in which they are measured: users first."""
    return [*(Load(concurrency=users) for users in concurrencies), *(Load(rate=rate) for rate in rates)]


def poisson_arrivals(rate: float, num_requests: int, seed: Sequence[int]) -> list[float]:
    """Return the arrival times in seconds from the start of a round, the first one at 0.

    The gaps of a Poisson process are independent and exponential with mean ``1 / rate``. Equal arguments give equal
    times: every configuration of a round meets the same arrivals.

    Args:
        rate: requests per second.
        num_requests: how many arrive.
        seed: whole numbers; others give other times.
    """
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return (np.cumsum(gaps_s) - gaps_s[0]).tolist()


def user_counts(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    """Parse ``--concurrency``: the numbers in ``1,2,4``; none without a text."""
    if text is None:
        return []
    numbers = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{text!r} is not a list of different positive numbers such as {DEFAULT_CONCURRENCY}")
    return numbers
