"""A rank that computes something else follows rank 0 all the same: the rows it verifies, and the text."""

from collections import deque

import pytest
import torch
from golden_server import CASES
from stage_loop import StageLoop
from step_tables import make_table

NUM_TOKENS = 12


class FirstRank:
    """Tells the others what it has."""

    needed = leads = True

    def __init__(self):
        self.told = deque()

    def share(self, value):
        self.told.append(value)
        return value

    def adopt(self, *tensors):
        self.told.append([None if tensor is None else tensor.clone() for tensor in tensors])


class OtherRank(FirstRank):
    """Takes over what it is told."""

    leads = False

    def __init__(self, first):
        self.told = first.told

    def share(self, value):
        return self.told.popleft()

    def adopt(self, *tensors):
        for tensor, agreed in zip(tensors, self.told.popleft(), strict=True):
            assert (tensor is None) == (agreed is None)
            if tensor is not None:
                tensor.copy_(agreed)


def served(agreement, disturb, options):
    """Texts, and the rows of every verification."""
    # Drafts cost so much that `auto` verifies some of them only.
    table = make_table(lambda r, d, c: 10 + 2.5 * d * r, lambda r, d, c: 1 + 0 * r, gamma=7)
    loop, plans = StageLoop(table, **options), []
    loop.eager.agreement = agreement
    served_plan = loop.eager.plan

    def plan(*arguments):
        plans.append(served_plan(*arguments))
        return plans[-1]

    loop.eager.plan = plan
    if disturb:
        loop.noise_seed += 1
        with torch.no_grad():
            loop.drafter.model.confidence_head.proj.weight.neg_()
    prompts = [case["prompt_ids"] for case in CASES[:3]]
    return loop.serve(prompts, NUM_TOKENS, temperature=1.5), [each.input_ids.tolist() for each in plans]


@pytest.mark.parametrize(
    "options",
    [{"schedule": "static"}, {"schedule": "threshold", "confidence_threshold": 0.6}, {}],
    ids=lambda o: o.get("schedule", "auto"),
)
def test_ranks_that_differ_decode_the_same(options):
    first = FirstRank()
    texts, plans = served(first, False, options)
    assert served(OtherRank(first), True, options) == (texts, plans)
    assert served(FirstRank(), True, options) != (texts, plans)
