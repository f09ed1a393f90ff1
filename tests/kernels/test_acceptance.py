"""The kernels of verification against the reference, in mixed batches too, and what no number may reach.

They sum masses in float32: where a random number is within some 1e-6 of an edge they may take the neighbour. The cases
here have none there.
"""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from acceptance_cases import SEED, STEP, Case, assert_same, make_case, reference, rows_of
from dspark_kernels import DraftDistribution, RoundKeys, SamplingBatch, accept, noise
from dspark_kernels.noise import seeded_noise, unit_exponential_52
from dspark_kernels.sampling import seeded_argmax, target_probs
from scipy import stats


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_lies_past_the_rows_is_not_read(device, temperature):
    """Slots without a request, rows of the tier that are not used, columns of a padded LM head."""
    case = make_case(device, [temperature] * 3, 4, 111, slots=2, dtype=torch.bfloat16)
    alone = make_case(device, [temperature] * 3, 4, 111, dtype=torch.bfloat16).accept()
    num_rows = len(case.logits)
    memory = torch.full((num_rows + 5, 128), 50.0, dtype=torch.bfloat16, device=device)
    memory[:num_rows, :111] = case.logits
    poison = torch.full_like(memory[:1, :111], torch.nan)
    tight = case.accept(logits=memory[:num_rows, :111])
    tier = case.accept(logits=torch.cat([memory[:num_rows, :111], poison]))
    for accepted in (tight, tier):
        assert torch.equal(accepted.out_tokens[:3], alone.out_tokens)
        assert accepted.out_tokens[3:].tolist() == [[0, -1, -1, -1, -1]] * 2
        assert accepted.accept_lens[3:].tolist() == accepted.bonus_tokens[3:].tolist() == [0, 0]


def test_ties_go_to_the_lowest_token(device):
    case = make_case(device, [0.0] * 2, 1, 9001, verify_lens=[1, 0])
    case.logits.zero_()
    case.logits[0, [4095, 4096, 9000]] = 1.0
    case.logits[1, [8999, 4100]] = 1.0
    case.drafts[0] = 4095
    accepted = case.accept()
    assert accepted.accept_lens.tolist() == [1, 0]
    assert accepted.bonus_tokens.tolist() == [4100, 0]


@pytest.mark.parametrize("reduced", [False, True])
def test_copied_tokens_are_one_hot_proposals(device, reduced):
    case = make_case(device, [1.0] * 9, 4, 23, reduced=reduced, verify_lens=[4] * 9)
    case.copied = torch.rand(9, 4, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    # A copied token needs no column.
    case.drafts[:, 1] = torch.where(case.copied[:, 1], 22, case.drafts[:, 1])
    assert_same(case.accept(), reference(case))
    # Tokens after those that were drawn are copied ones.
    case.copied[:, 2:] = True
    part = DraftDistribution(
        case.distribution.scores[:, :2].contiguous(), case.distribution.log_norms[:, :2], case.distribution.columns
    )
    behind = replace(case, distribution=part, copied=case.copied[:, :2])
    assert_same(behind.accept(), case.accept())
    assert_same(reference(behind), reference(case))
    behind.copied, case.copied = None, torch.arange(4, device=device).expand(9, -1) > 1
    assert_same(behind.accept(), case.accept())
    assert_same(reference(behind), reference(case))
    case.copied = torch.ones_like(case.copied)
    all_copied = case.accept()
    assert_same(all_copied, reference(case))
    assert_same(case.accept(distribution=None, copied=None), all_copied)


def test_greedy_requests_ignore_the_distribution(device):
    case = make_case(device, [0.0, 1.0], 3, 23, verify_lens=[3, 3])
    expected = case.accept()
    case.distribution.scores[0] = torch.nan
    case.distribution.log_norms[0] = torch.nan
    assert_same(case.accept(), expected)


def test_the_coldest_requests_follow_their_distribution(device):
    """The drafter is sure of token 3, the target has a tie of 3 and 9: both come out, as often as in the reference.

    Logits of 20 over 1e-6 are so large that float32 counts them in steps of 2.
    """
    bs, vocab_size = 40, 12
    logits = torch.zeros(2 * bs, vocab_size, device=device)
    logits[:, [3, 9]] = 20.0
    scores = torch.full((bs, 1, vocab_size), -100.0, device=device)
    scores[..., 3] = 0.0
    requests = torch.arange(bs, device=device)
    case = Case(
        torch.full((bs, 1), 3, device=device),
        torch.ones_like(requests),
        logits,
        torch.arange(bs + 1, device=device) * 2,
        DraftDistribution(scores, torch.zeros(bs, 1, device=device)),
        rows_of([1e-6] * bs, device),
        RoundKeys(SEED, STEP, requests, requests),
    )
    accepted, expected = case.accept(), reference(case)
    assert torch.equal(accepted.accept_lens, expected.accept_lens)
    assert stats.binomtest(int((accepted.out_tokens[:, 0] == 3).sum()), bs, 0.5).pvalue > 1e-4
    bonus = accepted.out_tokens[accepted.accept_lens == 1, 1]  # drawn from the tie itself
    assert stats.binomtest(int((bonus == 3).sum()), len(bonus), 0.5).pvalue > 1e-4
    assert {3, 9} == set(bonus.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_may_be_a_part_of_a_wider_buffer(device, temperature):
    case = make_case(device, [temperature] * 3, 4, 23)
    wide = torch.cat([case.drafts, torch.full((3, 3), 7, device=device)], dim=1)
    assert_same(case.accept(drafts=wide[:, :4]), case.accept())


def test_steps_on_the_device_and_on_the_host_agree(device):
    case = make_case(device, [1.0] * 3, 4, 23)
    expected = case.accept()
    assert_same(case.accept(keys=replace(case.keys, step=torch.tensor(STEP, device=device))), expected)


def test_a_vanished_residual_falls_back_to_the_target(device):
    """p_t = p_d up to rounding: whatever a rejection by rounding leaves, the token is a possible one."""
    case = make_case(device, [1.0] * 3, 1, 23, verify_lens=[1] * 3)
    case.logits[0::2] = case.distribution.scores[:, 0]
    case.logits[0::2, :11] = -torch.inf
    case.distribution.scores[:, 0, :11] = -torch.inf
    # Rejects whatever the uniform is, and leaves a residual of 0 everywhere.
    case.distribution.log_norms[:] = -80.0
    accepted = case.accept()
    assert accepted.accept_lens.tolist() == [0, 0, 0]
    assert (accepted.bonus_tokens >= 11).all()


def test_another_vocabulary_is_refused(device):
    case = make_case(device, [1.0] * 3, 4, 23)
    narrow = DraftDistribution(case.distribution.scores[..., :22], case.distribution.log_norms)
    for form in (case.accept, lambda **changes: reference(replace(case, **changes))):
        with pytest.raises(ValueError, match=r"22 tokens.*\(3, 4\) and 23"):
            form(distribution=narrow)


NOISE_RTOL = 1e-6  # what seeded_noise promises

# temperature, top_k, top_p, min_p, seed
GREEDY = (0.0, -1, 1.0, 0.0, None)
PLAIN = (0.9, -1, 1.0, 0.0, None)
QWEN = (0.6, 20, 0.95, 0.0, None)
NUCLEUS = (1.2, -1, 0.8, 0.0, None)
MIN_P = (1.0, 50, 1.0, 0.1, None)
SEEDED = (1.0, -1, 1.0, 0.0, -7)
SEEDED_QWEN = (0.6, 20, 0.95, 0.0, 2**63 + 5)
ALL = [GREEDY, PLAIN, QWEN, SEEDED, NUCLEUS, SEEDED_QWEN, MIN_P, (1.4, -1, 0.9, 0.02, 3)]


def rules_case(device, rules, gamma, vocab_size, **options):
    """``make_case`` with these requests; drafts of seeded ones are mostly what their seeds draw."""
    case = make_case(device, [rule[0] for rule in rules], gamma, vocab_size, **options)
    padding = len(case.drafts) - len(rules)
    case.rows = SamplingBatch.from_lists(
        *(list(column) for column in zip(*rules, *[PLAIN] * padding, strict=True)), device
    )
    positions = torch.arange(len(case.drafts), device=device) * 1000 + 2**31
    case.keys = replace(case.keys, positions=positions)
    return with_seeded_drafts(case)


def with_seeded_drafts(case):
    seeded = case.rows.seeded_index
    for slot in range(case.drafts.shape[1]):
        at = (case.indptr[seeded] + slot).clamp_max(len(case.logits) - 1)
        probs = target_probs(case.logits[at], case.rows.seeded_params)
        tokens = seeded_argmax(probs, case.rows.seeds[seeded], case.keys.positions[seeded] + slot)
        often = (seeded + slot) % 4 != 3
        case.drafts[seeded[often], slot] = tokens[often]
    return case


@pytest.fixture(autouse=True)
def kernels_alone(monkeypatch):
    """Nothing here may go to the reference unnoticed."""
    monkeypatch.setattr(accept, "reference", None)


SHAPES = [
    pytest.param((1, 0, 2), torch.float32, id="bs1-g0-v2"),
    pytest.param((2, 7, 9001), torch.bfloat16, id="bs2-g7-v9001-bfloat16"),
    pytest.param((3, 4, 4097), torch.float32, id="bs3-g4-v4097"),
    pytest.param((17, 5, 23), torch.float32, id="bs17-g5-v23"),
]
KINDS = {
    "greedy": [GREEDY],
    "plain": [PLAIN, (1.0, *PLAIN[1:]), (1.7, *PLAIN[1:])],
    "filtered": [QWEN, NUCLEUS, MIN_P],
    "seeded": [SEEDED, (0.8, -1, 1.0, 0.0, 2**40 - 7)],
    "seeded, filtered": [SEEDED_QWEN, (1.4, -1, 0.9, 0.02, 3)],
    "all": ALL,
}


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_verification_follows_the_rule_of_each_request(device, kind, shape, dtype):
    """Rows after the last one are no number."""
    (bs, gamma, vocab_size), rules = shape, KINDS[kind]
    how = {"dtype": dtype, "reduced": vocab_size == 23, "slots": 2 if kind == "all" else 0}
    case = rules_case(device, [rules[r % len(rules)] for r in range(bs)], gamma, vocab_size, **how)
    poisoned = torch.cat([case.logits, torch.full_like(case.logits[:3], torch.nan)])
    narrow = {"verify_lens": case.verify_lens.int(), "indptr": case.indptr.int()} if kind == "greedy" else {}
    accepted = case.accept(logits=poisoned, **narrow)
    assert_same(accepted, reference(case), slice(bs))
    assert bs < 17 or len(set(accepted.accept_lens.tolist())) >= 3
    assert accepted.out_tokens[bs:].tolist() == [[0, *[-1] * gamma]] * how["slots"]


def test_copied_tokens_of_filtered_requests(device):
    case = rules_case(device, [QWEN, NUCLEUS, MIN_P] * 2, 4, 23, verify_lens=[4] * 6)
    case.copied = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    assert_same(case.accept(), reference(case))


def test_rows_that_are_no_distribution_give_some_token(device):
    """Greedy requests get what the reference gives them."""
    rules = [GREEDY, PLAIN, QWEN, SEEDED, SEEDED_QWEN, NUCLEUS]
    case = rules_case(device, rules * 4, 1, 5000, verify_lens=[1] * 24)
    case.logits[:12] = torch.nan
    case.logits[12:24] = -torch.inf
    case.logits[24:36, 4500:] = torch.nan
    case.logits[36:, 150:] = torch.inf
    accepted = case.accept()
    assert ((accepted.bonus_tokens >= 0) & (accepted.bonus_tokens < 5000)).all()
    expected = reference(case).out_tokens[::6]
    assert torch.equal(accepted.out_tokens[::6], expected)


@triton.jit
def _noise_kernel(out_ptr, seeds_ptr, positions_ptr, first_pair, side: tl.constexpr):
    lane = tl.program_id(0)
    pairs = first_pair + tl.arange(0, side)
    drawn = seeded_noise(tl.load(seeds_ptr + lane), tl.load(positions_ptr + lane), pairs)
    tl.store(out_ptr + lane * (2 * side) + tl.arange(0, 2 * side), drawn)


@pytest.mark.parametrize("first_pair", [0, 75_900])
def test_the_noise_is_that_of_the_torch_generator(device, first_pair):
    side, seeds = 512, torch.tensor([0, 1, -7, 2**62 + 5, -(2**63)], device=device)
    positions = torch.tensor([0, 31, 70_000, 2**31 + 1, 2**32 - 1], device=device)
    found = torch.empty((5, 2 * side), dtype=torch.float32, device=device)
    _noise_kernel[(5,)](found, seeds, positions, first_pair, side=side)
    tokens = 2 * first_pair + torch.arange(2 * side, device=device)
    expected = noise.exponential_at(seeds[:, None], positions[:, None], tokens)
    torch.testing.assert_close(found.double(), expected, atol=0, rtol=NOISE_RTOL)


@triton.jit
def _exponential_kernel(high_ptr, low_ptr, out_ptr, side: tl.constexpr):
    lanes = tl.arange(0, side)
    high, low = tl.load(high_ptr + lanes).to(tl.uint32), tl.load(low_ptr + lanes).to(tl.uint32)
    tl.store(out_ptr + lanes, unit_exponential_52(high, low))


def test_the_noise_is_precise_from_end_to_end(device):
    """Every power of two and its neighbours, counted from both ends; the smallest decide."""
    edges = [2**power + shift for power in range(52) for shift in (-1, 0, 1)]
    edges = sorted({bits for edge in edges for bits in (edge, 2**52 - 1 - edge)})
    bits = torch.tensor((edges * 2)[:512])
    assert len(edges) > 256
    high, low = (bits >> 26 << 6) + 63, (bits & (2**26 - 1)) << 6
    found = torch.empty(512, dtype=torch.float32, device=device)
    _exponential_kernel[(1,)](high.to(device), low.to(device), found, side=512)
    # Near 1 the odd multiples of 2**-53 leave x, but not 1 - x, without rounding.
    rest = (2**52 - 1 - bits).double().add(0.5).mul(2.0**-52)
    torch.testing.assert_close(found.double().cpu(), -torch.log1p(-rest), atol=0, rtol=NOISE_RTOL)
