"""Tests of the sampling rule of each request, and of p_t against SGLang's own sampler in torch.

What SGLang leaves open is tested too: ties, the width of the cut, batch mates.
"""

import ast
import importlib.util
import itertools
from pathlib import Path
from typing import Optional

import pytest
import torch
from dspark_kernels import DraftBlock, DraftHeads, RoundKeys, SamplingBatch, Windows, accept, draft_block, sampling
from dspark_kernels.sampling import NO_TOP_K, target_probs


def one(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=None):
    return SamplingBatch.from_lists([temperature], [top_k], [top_p], [min_p], [seed])


@pytest.mark.parametrize("temperature", [1e20, 1e30, 3e38, 1e39, 1e300])
def test_a_forbidden_token_stays_forbidden_however_hot_the_others_are(temperature, device):
    """All others are equally likely: in drafting, whose distribution is exact for them, and in verification."""
    allowed = torch.arange(0, 64, 2, device=device)
    logits = torch.full((1, 64), -torch.inf, device=device)
    logits[:, allowed] = torch.linspace(-30, 30, 32, device=device)
    rows = SamplingBatch.from_lists([temperature], [-1], [1.0], [0.0], [None], device)
    uniform = torch.zeros_like(logits).index_fill_(1, allowed, 1 / 32)
    torch.testing.assert_close(target_probs(logits, rows.filter_params), uniform)
    keys = torch.zeros(1, dtype=torch.int64, device=device)
    for step in range(8):
        hidden = torch.zeros(1, 1, 4, device=device)
        noise = RoundKeys(1, step, keys, keys)
        block = draft_block(logits[None], hidden, keys, DraftHeads(None, None, None), rows, noise)
        torch.testing.assert_close(block.distribution.probs()[0], uniform, atol=1e-5, rtol=1e-5)
        assert int(block.tokens) in allowed
        windows = Windows(keys, torch.arange(2, device=device))
        drawn = accept(DraftBlock.empty(1, device), windows, logits, keys, rows, noise).bonus_tokens
        assert int(drawn) in allowed


def test_the_groups_partition_a_mixed_batch():
    temperatures, top_ks = [1.0, 0.0, 0.5, 0.9, 1.0, 1e-7, 0.7], [-1, -1, 4, 1, 7, -1, -1]
    min_ps, seeds = [0, 0.2, 0, 0, 0, 0, 0], [None, 5, None, 6, -8, None, 0]
    rows = SamplingBatch.from_lists(temperatures, top_ks, [0.9, 0.3, 1, 1, 1, 1, 1], min_ps, seeds)
    assert rows.greedy_index.tolist() == [1, 3, 5]
    assert rows.sampled_index.tolist() == [0, 2]
    assert rows.seeded_index.tolist() == [4, 6]
    assert rows.seeds[4] == -8
    torch.testing.assert_close(rows.filter_params.temperatures, torch.tensor([1.0, 1.0, 0.5, 1.0, 1.0, 1.0, 0.7]))
    assert not rows.filter_params.any_min_p  # the only min-p belongs to a greedy request
    assert rows.sampled_params.top_ks.tolist() == [NO_TOP_K, 4]
    assert (rows.any_greedy, rows.all_greedy, rows.any_sampled, rows.any_seeded) == (True, False, True, True)


@pytest.mark.parametrize(
    ("top_ks", "top_ps", "expected"),
    [
        ([-1, NO_TOP_K], [1, 1], 0),
        ([5, -1], [1, 1], 5),
        ([5, 9], [0.9, 1], 9),
        ([5, -1], [1, 0.9], NO_TOP_K),
        ([1, -1], [0.5, 1], 0),
    ],
)
def test_max_kept_bounds_what_the_cuts_leave(top_ks, top_ps, expected):
    assert SamplingBatch.from_lists([1.0, 1.0], top_ks, top_ps, [0, 0], [None, None]).filter_params.max_kept == expected


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_keep_their_64_bits(seed):
    assert (int(one(seed=seed).seeds[0]) - seed) % 2**64 == 0


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.1}, "min_p=1.1"),
    ],
)
def test_values_out_of_range_are_named(values, name):
    with pytest.raises(ValueError, match=name):
        one(**values)


def test_lists_of_different_lengths_are_named():
    with pytest.raises(ValueError, match="top_ps has 1 values for 2 temperatures"):
        SamplingBatch.from_lists([1, 1], [-1, -1], [1], [0, 0], [None, None])


def test_select_copies_only_when_it_must():
    rows = SamplingBatch.from_lists([1, 1], [-1, -1], [1, 1], [0, 0], [None, None])
    values = torch.arange(6).view(2, 3)
    assert rows.select(values, rows.sampled_index) is values
    mixed = SamplingBatch.from_lists([1, 0], [-1, -1], [1, 1], [0, 0], [None, None])
    assert mixed.select(values, mixed.greedy_index).tolist() == [[3, 4, 5]]


def test_an_empty_batch_is_legal():
    rows = SamplingBatch.from_lists([], [], [], [], [])
    assert len(rows) == len(rows.greedy_index) == len(rows.sampled_index) == len(rows.seeded_index) == 0


TEMPERATURES = (0.5, 1.0, 1.7)
TOP_KS = (-1, 5)
TOP_PS = (1.0, 0.8)
MIN_PS = (0.0, 0.1)
MATRIX = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))

MAX_TV = 5e-7


def filter_params(temperature, top_k, top_p, min_p, num_rows):
    columns = ([value] * num_rows for value in (temperature, top_k, top_p, min_p, None))
    return SamplingBatch.from_lists(*columns).filter_params


@pytest.fixture(scope="module")
def sglang_sample():
    """SGLang's sampling function, taken out of the installed file: importing its module costs ten seconds and more."""
    name = "top_k_top_p_min_p_sampling_from_probs_torch"
    path = Path(importlib.util.find_spec("sglang").origin).parent / "srt/layers/sampler.py"
    module = ast.parse(path.read_text())
    module.body = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name]
    namespace = {"torch": torch, "Optional": Optional}
    exec(compile(module, path, "exec"), namespace)
    return namespace[name]


def sglang_distribution(monkeypatch, sglang_sample, logits, params):
    """The weights SGLang hands to torch.multinomial, by token id and normalised."""
    seen = {}

    def whole_permutation(weights, num_samples):
        seen["weights"] = weights
        return torch.arange(weights.shape[-1]).expand_as(weights)

    monkeypatch.setattr(torch, "multinomial", whole_permutation)
    probs = torch.softmax(logits / params.temperatures[:, None], dim=-1)
    order = sglang_sample(probs, params.top_ks.int(), params.top_ps, params.min_ps, params.any_min_p, None, None)
    weights = torch.zeros_like(probs).scatter_(1, order.view(probs.shape).long(), seen["weights"])
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab_size", [7, 1111])
def test_distribution_is_sglangs(monkeypatch, sglang_sample, vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 40
    for combination in MATRIX:
        logits = torch.randn(num_rows, vocab_size, generator=generator) * 3
        logits[3, 2:5] = -torch.inf  # a grammar mask
        params = filter_params(*combination, num_rows)
        expected = sglang_distribution(monkeypatch, sglang_sample, logits, params)
        actual = target_probs(logits, params)
        assert ((actual - expected).abs().sum(-1) / 2).max() < MAX_TV, combination
        if combination[2] < 1.0:  # with top-p off, SGLang still drops the tail once its float32 sum rounds past 1
            assert torch.equal(actual > 0, expected > 0), combination


def test_mixed_rows_each_keep_their_own_distribution():
    logits = torch.randn(len(MATRIX), 333, generator=torch.Generator().manual_seed(1)) * 3
    mixed = SamplingBatch.from_lists(*(list(column) for column in zip(*MATRIX, strict=True)), [None] * len(MATRIX))
    together = target_probs(logits, mixed.filter_params)
    for row, combination in enumerate(MATRIX):
        assert torch.equal(together[row], target_probs(logits[row : row + 1], filter_params(*combination, 1))[0])


def test_greedy_neighbours_do_not_switch_filters_on(monkeypatch):
    rows = SamplingBatch.from_lists([0.0, 1.0], [4, -1], [0.5, 1.0], [0.3, 0.0], [None, None])
    monkeypatch.setattr(torch.Tensor, "topk", None)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    logits = torch.randn(2, 50)
    torch.testing.assert_close(target_probs(logits, rows.filter_params), logits.softmax(-1))


@pytest.mark.parametrize("combination", [(1.0, 3, 1.0, 0.0), (1.0, -1, 0.55, 0.0), (1.0, 3, 0.99, 0.05)])
def test_ties_at_the_cut_go_to_the_lowest_ids(combination):
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 2.0, 1.0, 1.0, -1.0]])
    probs = target_probs(logits, filter_params(*combination, 1))
    assert probs[0].nonzero().flatten().tolist() == [1, 2, 4]


def test_the_token_that_starts_at_exactly_p_stays():
    """Four tokens of exactly 1/4: the third is preceded by a mass of 0.5, which is not above 0.5."""
    probs = target_probs(torch.zeros(1, 4), filter_params(1.0, -1, 0.5, 0.0, 1))
    torch.testing.assert_close(probs, torch.tensor([[1.0, 1.0, 1.0, 0.0]]) / 3)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
@pytest.mark.parametrize("top_k", [-1, 600])
def test_every_route_to_the_cut_agrees(monkeypatch, top_p, top_k):
    """Coarse logits tie by the hundred; head search, full sort and the accelerator's route keep the same tokens."""
    logits = (torch.randn(9, 20_011, generator=torch.Generator().manual_seed(5)) * 8).round() / 4
    logits[:3] *= 6  # the cut of these rows lies early, of the others late
    params = filter_params(1.0, top_k, top_p, 0.0, 9)
    probs = target_probs(logits, params)
    monkeypatch.setattr(sampling, "_HEAD_SIZES", (3,))
    assert torch.equal(target_probs(logits, params), probs)
    monkeypatch.setattr(sampling, "reads_are_free", lambda _: False)
    assert torch.equal(target_probs(logits, params), probs)


def test_min_p_1_keeps_the_most_likely_tokens():
    probs = target_probs(torch.tensor([[1.0, 2.0, 0.0, 2.0]]), filter_params(1.0, -1, 1.0, 1.0, 1))
    assert probs.tolist() == [[0.0, 0.5, 0.0, 0.5]]


def test_rounding_never_turns_top_p_1_into_a_filter():
    """The float32 running sum of these rows passes 1 before their last tokens."""
    logits = torch.randn(40, 1111, generator=torch.Generator().manual_seed(1111)) * 6
    assert ((target_probs(logits, filter_params(1.0, 1000, 1.0, 0.0, 40)) > 0).sum(-1) == 1000).all()


def test_top_k_beyond_the_vocabulary_keeps_everything():
    logits = torch.randn(3, 20)
    torch.testing.assert_close(target_probs(logits, filter_params(1.0, 50, 1.0, 0.0, 3)), logits.softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_left_alone_and_probabilities_are_float32(dtype):
    logits = torch.randn(4, 50).to(dtype)
    before = logits.clone()
    probs = target_probs(logits, filter_params(0.7, 5, 0.9, 0.1, 4))
    assert torch.equal(logits, before)
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(4))


@pytest.mark.parametrize("elements", [1, 3000, 9999])
def test_rows_are_filtered_block_by_block_to_the_same_bits(monkeypatch, elements):
    """Blocks of one row and of several, the last one shorter."""
    logits = torch.randn(len(MATRIX), 1111, generator=torch.Generator().manual_seed(0))
    columns = [*(list(column) for column in zip(*MATRIX, strict=True)), [None] * len(MATRIX)]
    params = SamplingBatch.from_lists(*columns).filter_params
    whole = target_probs(logits, params)
    monkeypatch.setattr(sampling, "_MAX_ELEMENTS", elements)
    assert torch.equal(target_probs(logits, params), whole)
