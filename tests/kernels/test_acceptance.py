"""The kernels of verification against ``accept_ref``, against the same races in float64, and by distribution."""

from dataclasses import replace

import pytest
import torch
from acceptance_cases import SEED, STEP, Case, assert_same, check_sampled, make_case, reference, rows_of
from dspark_kernels import DraftDistribution, RoundKeys, accept
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
    assert check_sampled(case, case.accept(), range(9)) >= 8
    # Tokens behind those that were drawn are copied ones.
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
    assert check_sampled(case, all_copied, range(9)) >= 8
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


def test_a_distribution_that_is_written_out_is_refused(device):
    """It would go unread, and drafts would pass for copies."""
    case = make_case(device, [1.0] * 3, 4, 23)
    block, *given = case.given
    with pytest.raises(ValueError, match="draft them on this device"):
        accept(replace(block, probs=case.distribution.probs(), distribution=None), *given, case.rows, case.keys)


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
    with pytest.raises(ValueError, match=r"22 tokens.*\(3, 4\) and 23"):
        case.accept(distribution=narrow)
