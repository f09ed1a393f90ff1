"""Two requests that share a budget: under every rule each text follows the target, whatever was seen a round earlier.

Many independent pairs of requests, two rounds each. The first round's survivals and tokens decide about the second one:
its budget, whether it drafts at all, how its confidences are calibrated. The second round's text is tested.
"""

import numpy as np
import pytest
import torch
from confident_pair import ConfidentPair

from sglang_dspark.step.selected import top_prefixes
from sglang_dspark.step.selection import above_threshold, early_stop

pytestmark = pytest.mark.slow

ALPHA = 1e-4
NUM_PAIRS = 6_000
# Of two requests, by drafts verified: a slope on which early stop goes some way, and stairs that it does not climb.
SLOPE_MS = np.array([1.0, 1.3, 1.62, 2.2, 2.25, 2.3, 2.35])
STAIRS_MS = np.array([1.0, 2.2, 2.24, 2.28, 2.32, 2.36, 2.4])


@pytest.fixture(scope="module")
def model():
    return ConfidentPair(temperature=0.8)


class Round:
    """Drafts of all requests, with survivals by pair; confidences may be rounded up to make ties."""

    def __init__(self, model, anchors, step, ties):
        self.anchors, self.step = anchors, step
        self.block = model.draft(anchors, step)
        confidence = self.block.confidence_logits.sigmoid()
        match ties:
            case "some":
                confidence = (confidence * 4).ceil() / 4
            case "all":
                confidence = torch.ones_like(confidence)
        self.confidence = confidence

    def survival(self, exponent=None):
        """[pairs, 2, gamma], by pair."""
        confidence = self.confidence if exponent is None else self.confidence ** exponent.repeat_interleave(2)[:, None]
        return confidence.cumprod(1).unflatten(0, (-1, 2))

    def accept(self, model, lens):
        return model.accept(self.anchors, self.block, lens, self.step)


def p_value(model, rule, ties="none", num_pairs=NUM_PAIRS):
    """``rule(now, survival, before, pair)`` gives the lengths of a pair; ``survival`` [2, gamma] is calibrated."""
    requests = torch.arange(2 * num_pairs)
    first = Round(model, requests % model.vocab_size, 1, ties)
    done = first.accept(model, requests % (model.gamma + 1))
    now = Round(model, done.bonus_tokens, 2, ties)
    # Calibration moved after the first round, by what it saw; some pairs are parked.
    exponent = torch.tensor([0.5, 1.0, 2.0])[(done.accept_lens[::2] + first.block.tokens[::2, 2]) % 3]
    parked = (first.block.tokens[1::2, 1] + done.bonus_tokens[::2]) % 4 == 0
    before, live = first.survival(), now.survival(exponent)
    lens = torch.tensor([[0, 0] if parked[i] else list(rule(now, live[i], before[i], i)) for i in range(num_pairs)])
    assert len(lens.unique()) > 1
    return model.distribution_p_value(now.anchors, now.accept(model, lens.view(-1)).out_tokens)


def budget_of(survival):
    """Nothing, half or everything, by the confidence of the second drafts, which reveals the first ones."""
    return 3 * int((survival[:, 1] / survival[:, 0] > 0.8).sum())


def top(now, survival, before, pair):
    return top_prefixes(survival, max(0, budget_of(before) - pair % 3)).tolist()


def stop_early(now, survival, before, pair):
    return early_stop(survival.double().numpy(), SLOPE_MS)


def threshold(now, survival, before, pair):
    return above_threshold(now.confidence[2 * pair : 2 * pair + 2], 0.6).tolist()


def uniform(now, survival, before, pair):
    return [budget_of(before) // 2] * 2


def randomly(now, survival, before, pair):
    return np.random.default_rng(pair).integers(0, 4, size=2).tolist()


@pytest.mark.parametrize("rule", [top, stop_early, threshold, uniform, randomly])
def test_the_text_follows_the_target(model, rule):
    assert p_value(model, rule) > ALPHA


@pytest.mark.parametrize("ties", ["some", "all"])
@pytest.mark.parametrize("rule", [top, stop_early])
def test_ties_leave_the_text_alone(model, rule, ties):
    assert p_value(model, rule, ties) > ALPHA


def live_budget(now, survival, before, pair):
    return top_prefixes(survival, budget_of(survival)).tolist()


def best_in_hindsight(now, survival, before, pair):
    order = survival.double().T.reshape(-1).sort(descending=True, stable=True)
    rates = (2 + np.pad(order.values.cumsum(0).numpy(), (1, 0))) / STAIRS_MS
    return np.bincount(order.indices[: int(rates.argmax())].numpy() % 2, minlength=2).tolist()


def one_draft_ahead(now, survival, before, pair):
    """Ranks every draft by its successor's survival."""
    return top_prefixes(torch.cat([survival[:, 1:], survival[:, -1:]], dim=1), 2).tolist()


@pytest.mark.parametrize("rule", [live_budget, best_in_hindsight, one_draft_ahead])
def test_rules_that_anticipate_are_noticed(model, rule):
    assert p_value(model, rule, num_pairs=2 * NUM_PAIRS) < ALPHA
