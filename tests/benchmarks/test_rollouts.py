"""The loop of rollouts: what earns a reward, where a step goes, and how samples are tested."""

import numpy as np
import pytest
import torch
from rollouts import ALPHA, learn, next_distributions, noticed, reward, uniforms
from scipy.stats import binom, kstest
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, VOCABULARY, TRIES = 500, 40, 150


def tiny_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)).eval()


@pytest.mark.parametrize(
    ("text", "earned"),
    [("It is 12.", 1.0), (" 5 + 7 = 12.\n\nQ: 13", 1.0), ("12 or 13", 0.0), ("twelve", 0.0)],
)
def test_the_last_number_of_an_answer_counts(text, earned):
    assert reward(text, 12) == earned


def test_what_beats_its_group_becomes_likelier():
    model = tiny_model()
    answers = [{"output_ids": [5, 6]}, {"output_ids": [7, 8]}]
    ids = torch.tensor([[1, 2, 3, *answer["output_ids"]] for answer in answers])

    def likely():
        with torch.no_grad():
            logprobs = model(ids[:, :-1]).logits.log_softmax(-1)[:, 2:]
        return logprobs.gather(2, ids[:, 3:, None]).sum(1).flatten().tolist()

    before = likely()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    alike_ones = ([1, 2], answers, np.array([1.0, 1.0]))
    assert learn(model, optimizer, [([1, 2, 3], answers, np.array([1.0, 0.0])), alike_ones]) > 0
    after = likely()
    assert after[0] > before[0] and after[1] < before[1]


@pytest.fixture(scope="module")
def expected():
    """Those of many places: some are all but sure, some know nothing."""
    draw = torch.Generator().manual_seed(0)
    spreads = torch.rand(TOKENS, 1, generator=draw) * 4
    return (torch.randn(TOKENS, VOCABULARY, generator=draw) * spreads).softmax(-1)


def p_value(expected, of_samples, seed):
    """That of tokens drawn from other distributions than expected."""
    tokens = torch.multinomial(of_samples, 1, generator=torch.Generator().manual_seed(seed))[:, 0]
    return kstest(uniforms(expected, tokens, np.random.default_rng(seed)), "uniform").pvalue


def test_samples_of_the_expected_distributions_pass(expected):
    found = [p_value(expected, expected, seed) for seed in range(TRIES)]
    for level in (0.05, 0.3):
        least, most = binom.ppf([0.001, 0.999], TRIES, level)
        assert least <= sum(p < level for p in found) <= most


def test_a_distance_is_noticed_nine_times_of_ten():
    half = torch.full((TOKENS, 2), 0.5)
    other = half + noticed(TOKENS) * torch.tensor([1, -1])  # one of two tokens is drawn more often
    assert sum(p_value(half, other, seed) < ALPHA for seed in range(TRIES)) > 0.85 * TRIES
    alike = torch.full((2000, VOCABULARY), 1 / VOCABULARY)
    one_for_many = alike.clone()
    one_for_many[:, 20:] *= 0.5
    one_for_many[:, 30] += 0.25
    assert p_value(alike, one_for_many, 0) < ALPHA


def test_distributions_after_every_prefix():
    model, prompt, answers = tiny_model(), [1, 2, 3], [[4, 5, 6], [7, 8, 9]]
    with torch.no_grad():
        apart = [
            model(torch.tensor([[*prompt, *answer[:known]]])).logits[0, -1].softmax(-1)
            for answer in answers
            for known in range(3)
        ]
    torch.testing.assert_close(next_distributions(model, prompt, answers), torch.stack(apart))
