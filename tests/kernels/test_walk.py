"""The kernels' walk against plain torch, and the distribution of what it draws."""

from dataclasses import replace

import pytest
import torch
from dspark_kernels import (
    DraftVocabulary,
    RoundKeys,
    SamplingBatch,
    draft_block,
    draft_block_ref,
    draw,
)
from dspark_kernels.drafting import walk
from literal import Request
from pairwise import pairwise
from walk_case import GREEDY, MIXED, WalkCase

# Triton's interpreter multiplies the bit patterns of bfloat16, whose rounding would decide draws.
HALF = torch.float16
# Both sides sum rank and v products in float32, in different orders; the reference rounds biases to the weights' dtype.
TOLERANCES = {torch.float32: {"atol": 2e-5, "rtol": 2e-5}, HALF: {"atol": 5e-3, "rtol": 5e-3}}


def check(case):
    """Compare the kernels' walk with the reference; return the block."""
    found, expected, rows = case.run(draft_block), case.run(draft_block_ref), case.rows
    tolerance = TOLERANCES[case.base.dtype]
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, **tolerance)
    assert (found.distribution is None) == (expected.distribution is None) == (not rows.any_sampled)
    if found.distribution is not None:
        of_both = [
            [part[rows.sampled_index] for part in (d.scores, d.log_norms, d.probs())]
            for d in (found.distribution, expected.distribution)
        ]
        torch.testing.assert_close(*of_both, **tolerance)
    return found


OTHER = DraftVocabulary(torch.arange(3), 150)


SEEDED = tuple(replace(rule, seed=seed) for rule, seed in zip(MIXED, (None, 2**62 + 5, -3), strict=True))
THIRD = range(1, 150, 3)


@pytest.mark.parametrize(
    ("head_type", "dtype", "rules", "token_ids", "eight_bits"),
    pairwise(
        ["vanilla", "gated", "rnn", "selector", None],
        [torch.float32, HALF],
        [GREEDY, MIXED, SEEDED],
        [None, THIRD],
        [False, True],
    ),
)
def test_every_walk(device, head_type, dtype, rules, token_ids, eight_bits):
    given = {"head_type": head_type, "dtype": dtype, "token_ids": token_ids, "eight_bits": eight_bits}
    case = WalkCase(device, rules, bs=6, gamma=4, **given)
    block = check(case)
    assert token_ids is None or (block.tokens % 3 == 1).all()


@pytest.mark.parametrize(
    ("bs", "gamma", "v", "rank", "dtype", "head_type"),
    [
        (1, 1, 7, 1, torch.float32, "vanilla"),
        (1, 7, 64, 16, HALF, "vanilla"),
        (3, 2, 193, 40, torch.float32, "vanilla"),
        (17, 2, 129, 5, HALF, "vanilla"),
        (17, 1, 300, 256, torch.float32, "vanilla"),
        (2, 2, 333, 256, HALF, "vanilla"),
        (70, 1, 97, 5, torch.float16, "vanilla"),
        (1, 1, 3, 1, torch.float32, "selector"),  # fewer tokens than may compete
        (1, 7, 64, 16, HALF, "selector"),
        (17, 2, 129, 300, torch.float32, "selector"),
    ],
)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_odd_sizes(device, bs, gamma, v, rank, dtype, head_type, eight_bits):
    given = {"dtype": dtype, "head_type": head_type, "eight_bits": eight_bits}
    check(WalkCase(device, MIXED, bs=bs, gamma=gamma, v=v, rank=rank, **given))


@pytest.mark.parametrize("finish_tile", [16, 64])
def test_many_programs_are_merged_in_rounds(device, monkeypatch, finish_tile):
    """Ten programs' results, of which a merge takes one or four at a time."""
    monkeypatch.setattr(walk, "_FINISH_TILE", finish_tile)
    monkeypatch.setattr(walk, "num_processors", lambda device: 5)
    check(WalkCase(device, MIXED, bs=3, v=700))


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6])
def test_the_coldest_drafts_are_drawn_from_the_distribution_that_is_stored(device, temperature):
    """Scores of 2e7 would have left a tie of two tokens with the probability 1 each."""
    case = WalkCase(device, [Request(temperature)], bs=2, gamma=1, v=70, head_type=None)
    case.base.zero_()
    case.base[:, :, [3, 9]] = 20.0
    probs = case.run(draft_block).distribution.probs()
    torch.testing.assert_close(probs[..., [3, 9]], torch.full_like(probs[..., :2], 0.5), atol=1e-3, rtol=0)


@pytest.mark.parametrize("room", [100_000, 200_000])
def test_scores_are_rounded_before_they_are_summed(room):
    """On a GPU the compiler would subtract from the product before it is rounded, and what is stored is rounded."""
    tiles = walk._Tiles(groups=1, programs=1, block_b=16, rank=0, block_r=16)
    assert tiles.options(room)["enable_fp_fusion"] is False


def test_ties_go_to_the_lowest_column(device):
    case = WalkCase(device, GREEDY, bs=4, gamma=1, v=300, head_type=None)
    case.base.zero_()
    for row, columns in enumerate([(299, 130), (64, 65, 200), (191, 63)]):
        case.base[row, 0, list(columns)] = 1.0
    assert case.run(draft_block).tokens.flatten().tolist() == [130, 64, 63, 0]


def test_nan_and_infinite_logits_never_give_an_id_outside_the_vocabulary(device):
    case = WalkCase(device, [Request(0.0), Request(1.0)], bs=4, gamma=2, v=70, head_type=None)
    case.base[0] = float("nan")
    case.base[1] = float("nan")
    case.base[2] = float("-inf")
    case.base[3] = float("-inf")
    case.base[3, :, 69] = 1.0
    tokens = case.run(draft_block).tokens
    assert tokens[:3].tolist() == [[0, 0]] * 3
    assert tokens[3].tolist() == [69, 69]


@pytest.mark.parametrize("any_sampled", [True, False])
def test_seeded_requests_draw_with_their_own_noise(device, any_sampled):
    seeds = [None, 2**62 + 5, None if any_sampled else 9, None, None if any_sampled else 17, -3]
    rules = [Request(r.temperature, seed=seed) for r, seed in zip(MIXED * 2, seeds, strict=True)]
    case = WalkCase(device, rules, bs=6)
    assert case.rows.any_sampled == any_sampled
    block = check(case)
    case.follow([replace(r, seed=None if r.seed is None else r.seed + 1) for r in rules])
    other = case.run(draft_block)
    assert torch.equal((other.tokens != block.tokens).any(1), case.rows.is_seeded)


def test_a_seeded_draft_is_the_token_that_the_same_logits_draw(device):
    """If drafts agree with the target in all but the noise, seeded requests accept everything."""
    rules = [Request(0.9, seed=seed) for seed in (3, 1, 4, 1, 5)]
    case = WalkCase(device, rules, bs=5, gamma=2, v=41, head_type=None)
    block = case.run(draft_block)
    assert block.distribution is None
    for slot in range(2):
        keys = RoundKeys(0, 0, case.keys.request_keys, case.keys.positions + slot)
        assert torch.equal(block.tokens[:, slot], draw(case.base[:, slot], case.rows, keys))


def test_spreading_a_block_keeps_its_distribution(device):
    block = WalkCase(device, [Request(0.8)], bs=2, token_ids=[1, 5, 44]).run(draft_block)
    spread = block.spread(torch.tensor([3, 0], device=device), 4)
    assert torch.equal(spread.tokens[[3, 0]], block.tokens)
    assert torch.equal(spread.distribution.probs()[[3, 0]], block.distribution.probs())
    assert spread.distribution.probs().isfinite().all()


def test_a_graph_replays_with_new_steps_temperatures_and_anchors(device):
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    case = WalkCase(device, MIXED, bs=5, gamma=4)
    temperatures = case.rows.draw_temperatures
    rows = SamplingBatch.by_temperature(5, temperatures, device)
    case.run(draft_block, rows=rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block = case.run(draft_block, rows=rows)
    for _ in range(3):
        case.keys.step.add_(1)
        temperatures.copy_(temperatures.roll(1))
        case.anchors.copy_(case.anchors.roll(1))
        case.base.copy_(case.base.roll(1, 0))
        graph.replay()
        expected = case.run(draft_block_ref, rows=rows)
        assert torch.equal(block.tokens, expected.tokens)
        sampled = temperatures > 0
        torch.testing.assert_close(
            block.distribution.log_norms[sampled], expected.distribution.log_norms[sampled], **TOLERANCES[torch.float32]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: setattr(case, "base", case.base.transpose(1, 2)), "must be contiguous"),
        (lambda case: setattr(case, "base", case.base[..., :-1].contiguous()), "same checkpoint"),
        (lambda case: setattr(case, "heads", replace(case.heads, vocabulary=OTHER)), "ProposalHeads"),
    ],
)
def test_parts_that_do_not_fit_are_refused(device, change, message):
    case = WalkCase(device)
    change(case)
    with pytest.raises(ValueError, match=message):
        case.run(draft_block)


def test_the_confidence_of_a_selector_does_not_depend_on_the_draft_itself(device):
    """Otherwise drafts that look good would be verified more often, and the text would be biased towards them."""
    case = WalkCase(device, [Request(1.3)], bs=6, gamma=4, head_type="selector")
    for form in (draft_block, draft_block_ref):
        block = case.run(form)
        other = case.run(form, keys=replace(case.keys, step=case.keys.step + 1))
        differ = block.tokens != other.tokens
        # The first draft that differs included.
        same = torch.cat((torch.zeros_like(differ[:, :1]), differ[:, :-1]), 1).cumsum(1) == 0
        assert torch.equal(block.confidence_logits[same], other.confidence_logits[same])
        assert (differ & same)[:, :3].any() and (block.confidence_logits != other.confidence_logits)[~same].any()
