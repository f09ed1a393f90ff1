"""A policy that looks at nothing: exactness must not depend on how much is verified."""

import numpy as np

from sglang_dspark.scheduling.policies import Policy
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength
from sglang_dspark.step.state import RequestLimits


class RandomPolicy(Policy):
    """Draw 0 to ``most`` drafts for each request in each step."""

    name = "random"
    needs_confidence = False

    def __init__(self, most):
        self._most, self._rng = most, np.random.default_rng(0)

    def choose(self, requests, context, extra=None):
        lens = self._rng.integers(0, self._most + 1, size=requests).tolist()
        return StepDecision(self._most, FixedLength()).within(RequestLimits(tuple(lens)))

    def report(self):
        return {}
