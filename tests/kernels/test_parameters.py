"""The rule that each request follows, and what the host remembers about the batch."""

import pytest
import torch
from dspark_kernels import DraftBlock, DraftHeads, RoundKeys, SamplingBatch, Windows, accept, draft_block
from dspark_kernels.sampling import NO_TOP_K, target_probs


def one(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, seed=None):
    return SamplingBatch.from_lists([temperature], [top_k], [top_p], [min_p], [seed])


def rule(rows):
    return [rows.greedy_index.shape[0], rows.sampled_index.shape[0], rows.seeded_index.shape[0]]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 0.0}, [1, 0, 0]),
        ({"temperature": 1e-7, "seed": 3}, [1, 0, 0]),
        ({"temperature": 0.7, "top_k": 1}, [1, 0, 0]),
        ({"temperature": 0.7}, [0, 1, 0]),
        ({"temperature": 0.7, "seed": 0}, [0, 0, 1]),
    ],
)
def test_each_request_follows_one_rule(values, expected):
    assert rule(one(**values)) == expected


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
    rows = SamplingBatch.from_lists(
        [1.0, 0.0, 0.5, 0.9, 1.0], [-1, -1, 4, 1, 7], [0.9, 0.3, 1, 1, 1], [0, 0.2, 0, 0, 0], [None, 5, None, 6, -8]
    )
    assert rows.greedy_index.tolist() == [1, 3]
    assert rows.sampled_index.tolist() == [0, 2]
    assert rows.seeded_index.tolist() == [4]
    assert rows.seeds[4] == -8
    assert rows.filter_params.temperatures.tolist() == [1.0, 1.0, 0.5, 1.0, 1.0]
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
    assert len(rows) == 0 and rule(rows) == [0, 0, 0]
