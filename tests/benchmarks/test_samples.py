"""The test of sampled tokens: right laws pass it, and others are noticed as often as it says."""

import pytest
import torch
from samples import ALPHA, DISTANCE, Tally, next_laws
from scipy.stats import binom
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, VOCABULARY, TRIES = 500, 40, 150


@pytest.fixture(scope="module")
def laws():
    """Those of many places: some are all but sure, some know nothing."""
    draw = torch.Generator().manual_seed(0)
    spreads = torch.rand(TOKENS, 1, generator=draw) * 4
    return (torch.randn(TOKENS, VOCABULARY, generator=draw) * spreads).softmax(-1)


def drawn(laws, seed):
    return torch.multinomial(laws, 1, generator=torch.Generator().manual_seed(seed))[:, 0]


def moved(laws):
    """A tenth of the mass is others' that was the likeliest token's."""
    most, likeliest = laws.max(1, keepdim=True)
    less = most.clamp(max=DISTANCE)
    return (laws * (1 + less / (1 - most))).scatter(1, likeliest, most - less)


def p_values(laws, of_samples, against=None):
    """Those of many samples, against the law or against as many of another one."""
    found = []
    for seed in range(TRIES):
        sample = Tally.of(laws, drawn(of_samples, seed))
        if against is not None:
            sample -= Tally.of(laws, drawn(against, TRIES + seed))
        found.append(sample.report()["p_value"])
    return found


@pytest.mark.parametrize("two_samples", [False, True])
def test_right_laws_pass(laws, two_samples):
    found = p_values(laws, laws, laws if two_samples else None)
    for level in (0.05, 0.3):
        least, most = binom.ppf([0.001, 0.999], TRIES, level)
        assert least <= sum(p < level for p in found) <= most


def test_samples_of_one_wrong_law_are_alike(laws):
    """Two servers that do the same do not differ."""
    assert sum(p < 0.01 for p in p_values(laws, moved(laws), moved(laws))) < 15


@pytest.mark.parametrize("two_samples", [False, True])
def test_the_power_is_what_it_says(laws, two_samples):
    found = p_values(laws, moved(laws), laws if two_samples else None)
    one = Tally.of(laws, drawn(laws, 0))
    told = (one - one if two_samples else one).report()[f"power_at_{DISTANCE}"]
    assert 0.1 < told < 0.99
    assert sum(p < ALPHA for p in found) / TRIES == pytest.approx(told, abs=0.1)


def test_tokens_that_are_drawn_for_others_of_their_rank_are_noticed():
    """Ranks alone would not see that: one of the rarest tokens is drawn for the others."""
    law = torch.where(torch.arange(VOCABULARY) < 16, 0.0325, 0.02)
    other = torch.where(torch.arange(VOCABULARY) < 16, 0.0325, 0.012)
    other[20] += 24 * 0.008
    places = 2000, VOCABULARY
    assert Tally.of(law.expand(places), drawn(other.expand(places), 1)).report()["p_value"] < ALPHA


def test_laws_behind_every_prefix():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).eval()
    prompt, answers = [1, 2, 3], [[4, 5, 6], [7, 8, 9]]
    with torch.no_grad():
        whole = model(torch.tensor([[*prompt, *answer] for answer in answers])).logits[:, 2:-1].softmax(-1)
    torch.testing.assert_close(next_laws(model, prompt, answers), whole)
