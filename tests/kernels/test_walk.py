"""The kernels' walk against plain torch, and the distribution of what it draws."""

import itertools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from dspark_kernels import (
    DraftVocabulary,
    Purpose,
    RoundKeys,
    SamplingBatch,
    draft_block,
    draft_block_ref,
    draw,
)
from dspark_kernels.drafting import walk
from dspark_kernels.sampling import noise
from dspark_kernels.sampling.noise_device import race_noise, unit_exponential
from literal import Request
from pairwise import pairwise
from raced_walk import raced_walk
from scipy import stats
from walk_case import GREEDY, MIXED, WalkCase

ALPHA = 1e-4
# Triton's interpreter multiplies the bit patterns of bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
NOISE_RTOL = 1e-6  # what device_noise promises
# Both sides sum rank and v products in float32, in different orders.
FLOAT32_TOL = {"atol": 2e-5, "rtol": 2e-5}


def check(case):
    """Compare the kernels' walk with the formula; return the block."""
    found, expected, rows = case.run(draft_block), case.run(raced_walk), case.rows
    assert torch.equal(found.tokens, expected.tokens)
    assert found.probs is None
    torch.testing.assert_close(found.confidence_logits, expected.confidence_logits, **FLOAT32_TOL)
    assert (found.distribution is None) == (expected.distribution is None) == (not rows.any_sampled)
    if found.distribution is not None:
        of_both = [
            [part[rows.sampled_index] for part in (d.scores, d.log_norms, d.probs())]
            for d in (found.distribution, expected.distribution)
        ]
        torch.testing.assert_close(*of_both, **FLOAT32_TOL)
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
    """Greedy requests draft what the reference drafts."""
    given = {"head_type": head_type, "dtype": dtype, "token_ids": token_ids, "eight_bits": eight_bits}
    case = WalkCase(device, rules, bs=6, gamma=4, **given)
    block = check(case)
    assert token_ids is None or (block.tokens % 3 == 1).all()
    if rules is GREEDY and dtype == torch.float32:
        expected = case.run(draft_block_ref)
        assert torch.equal(block.tokens, expected.tokens)
        torch.testing.assert_close(block.confidence_logits, expected.confidence_logits, **FLOAT32_TOL)


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


def test_the_stored_distribution_is_that_of_the_reference(device):
    """Scores are softmax(corrected logits / T) of the tokens that were drafted: feed both walks the same block."""
    case = WalkCase(device, [Request(0.7)], bs=2, gamma=1)
    torch.testing.assert_close(
        case.run(draft_block).distribution.probs(), case.run(draft_block_ref).probs, **FLOAT32_TOL
    )


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


@triton.jit
def _noise_kernel(out_ptr, keys_ptr, step_ptr, seed, slot, side: tl.constexpr):
    lanes = tl.arange(0, side)
    keys, step = tl.load(keys_ptr + lanes), tl.load(step_ptr)
    noise = race_noise(seed, step, keys[:, None], slot, 0, lanes[None, :])
    tl.store(out_ptr + lanes[:, None] * (4 * side) + tl.arange(0, 4 * side)[None, :], noise)


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 3, -(2**62) - 5])
def test_the_noise_is_that_of_the_torch_generator(device, seed):
    """Words that differed in any bit of the counter or the key would have nothing in common."""
    side, step, slot = 16, 2**39 + 2**33 + 17, 6
    keys = torch.arange(side, device=device) * 2**28
    found = torch.empty((side, 4 * side), dtype=torch.float32, device=device)
    _noise_kernel[(1,)](found, keys, torch.tensor(step, device=device), seed, slot, side=side)
    expected = noise.race_exponential(seed, step, keys, slot, Purpose.DRAFT, 4 * side)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=NOISE_RTOL)


@triton.jit
def _exponential_kernel(bits_ptr, out_ptr, side: tl.constexpr):
    lanes = tl.arange(0, side)
    tl.store(out_ptr + lanes, unit_exponential(tl.load(bits_ptr + lanes).to(tl.uint32)))


def test_the_noise_is_precise_from_end_to_end(device):
    """Every power of two and its neighbours, counted from both ends; the smallest decide races."""
    edges = [2**power + shift for power in range(32) for shift in (-1, 0, 1)]
    edges = sorted({bits for edge in edges for bits in (edge, 2**32 - 1 - edge) if 0 <= bits < 2**32})
    bits = torch.tensor((edges * 2)[:256], device=device)
    found = torch.empty(256, dtype=torch.float32, device=device)
    _exponential_kernel[(1,)](bits, found, side=256)
    expected = -torch.log1p(-(bits.double() + 0.5) * 2.0**-32)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=NOISE_RTOL)


def test_the_noise_of_a_race_is_exponential():
    values = noise.race_exponential(5, 9, torch.arange(50), 0, Purpose.DRAFT, 4001)
    assert values.shape == (50, 4001)
    assert values.min() > 0 and values.isfinite().all()
    assert stats.kstest(values.flatten().numpy(), "expon").pvalue > ALPHA
    narrow = noise.race_exponential(5, 9, torch.arange(50), 0, Purpose.DRAFT, 13)
    assert torch.equal(narrow, values[:, :13])


def test_no_counter_serves_twice(monkeypatch):
    """Races of slots, steps, requests and purposes, and the uniforms beside them."""
    used = []

    def record(counter, key):
        words = torch.broadcast_tensors(*(torch.as_tensor(word) for word in (*counter, *key)))
        used.extend(zip(*(word.flatten().tolist() for word in words), strict=True))
        return philox(counter, key)

    philox = noise.philox4x32
    monkeypatch.setattr(noise, "philox4x32", record)
    requests = torch.tensor([0, 1, 2, 2**31])
    for step, purpose in itertools.product((0, 1, 2**32), (Purpose.DRAFT, Purpose.ACCEPT)):
        keys = RoundKeys(1, step, requests, requests)
        keys.block_uniform(3, purpose)
        for slot in range(3):
            keys.race(slot, purpose, 10)
    assert len(used) == len(set(used)) == 6 * 4 * (3 + 3 * 3)


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
    assert block.distribution is None and block.probs is None
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
        expected = case.run(raced_walk, rows=rows)
        assert torch.equal(block.tokens, expected.tokens)
        sampled = temperatures > 0
        torch.testing.assert_close(
            block.distribution.log_norms[sampled], expected.distribution.log_norms[sampled], **FLOAT32_TOL
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
