"""The smallest model in which speculation pays at a light load and loses at a heavy one.

A step takes one unit of time as long as its tokens fit the machine's capacity, and in proportion to them beyond:
``max(1, tokens / capacity)``. Every request has the same acceptance: the i-th draft of a block (from 0) is accepted
with probability ``first * decay ** i``, given that all before it are. Plain decoding has one token per request and
step, ``fixed`` verifies the whole block, ``scheduled`` as many drafts as give the most tokens per unit of time.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

POLICIES = ("plain", "fixed", "scheduled")


@dataclass(frozen=True)
class ModelPoint:
    """A policy at a number of users.

    Attributes:
        verify_len: drafts verified per request and step.
        accept_length: tokens committed per request and step.
        user_speed: tokens per unit of time of one user; 1 is plain decoding on an idle machine.
        wasted: share of the verified drafts that are rejected.
    """

    verify_len: int
    accept_length: float
    user_speed: float
    wasted: float


@dataclass(frozen=True)
class CrossoverModel:
    """The model of the module's docstring.

    Attributes:
        first: acceptance of the first draft.
        decay: what the acceptance is multiplied by from draft to draft; a Markov head raises it.
        block: drafts per block.
        capacity: tokens that a step has room for at no extra cost.
    """

    first: float = 0.9
    decay: float = 0.95
    block: int = 7
    capacity: int = 128

    @property
    def survival(self) -> NDArray[np.float64]:
        """Return [block] the probability that a draft and all before it are accepted."""
        survival: NDArray[np.float64] = np.cumprod(self.first * self.decay ** np.arange(self.block))
        return survival

    def point(self, policy: str, users: int) -> ModelPoint:
        """Return the throughput of ``policy``, one of :data:`POLICIES`, with this many users."""
        if policy == "scheduled":
            lengths = (self._verifying(length, users) for length in range(self.block + 1))
            return max(lengths, key=lambda point: point.user_speed)
        return self._verifying(self.block if policy == "fixed" else 0, users)

    def _verifying(self, length: int, users: int) -> ModelPoint:
        accepted = float(self.survival[:length].sum())
        step = max(1.0, users * (1 + length) / self.capacity)
        wasted = 1 - accepted / length if length else 0.0
        return ModelPoint(length, 1 + accepted, (1 + accepted) / step, wasted)

    @property
    def crossover(self) -> float:
        """Return the users from which on whole blocks are slower than plain decoding.

        There the step of whole blocks, ``users (block + 1) / capacity``, takes as long as its accept length in plain
        steps, which still fit the capacity.
        """
        return self.point("fixed", 1).accept_length * self.capacity / (1 + self.block)
