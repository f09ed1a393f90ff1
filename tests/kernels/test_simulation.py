"""Acceptance by chance: the kernel and its torch form against one request at a time, and by law."""

import pytest
import torch
from dspark_kernels import Accepted, Purpose, RoundKeys, simulated_accept, simulated_accept_ref
from scipy import stats

SEED, STEP = 2**63 + 12345, (7 << 32) + 99  # all words of the key and the counter in use
PROFILE = (0.9, 0.4, 1.0, 0.5, 0.7, 0.0, 0.8)


def case(bs, gamma, device, seed=0, step=STEP):
    """Judged blocks of ``gamma`` drafts, a part of which is under verification."""
    generator = torch.Generator().manual_seed(seed)

    def ints(*shape, most=1000):
        return torch.randint(0, most, shape, generator=generator)

    verify_lens = ints(bs, most=gamma + 1)
    accepted_lens = (torch.rand(bs, generator=generator) * (verify_lens + 1)).long()
    judged = Accepted(
        accepted_lens.to(device),
        ints(bs).to(device),
        ints(bs, gamma + 1).to(device),
        (500 + accepted_lens + 1).to(device),
    )
    keys = RoundKeys(SEED, step, (torch.arange(bs) * 7 + 2**33).to(device), torch.zeros(bs, dtype=torch.int64))
    # A part of a wider buffer, as the drafts of a captured step are.
    drafts = ints(bs, gamma + 3).to(device)[:, :gamma]
    return judged, drafts, verify_lens.to(device), torch.tensor(PROFILE, dtype=torch.float64, device=device), keys


def one_by_one(judged, drafts, verify_lens, profile, keys):
    """What has to come out, request by request."""
    uniforms = keys.block_uniform(drafts.shape[1], Purpose.ACCEPT).tolist() if drafts.shape[1] else [[]] * len(drafts)
    lens, tokens = [], []
    for request, block in enumerate(drafts.tolist()):
        length = 0
        while length < verify_lens[request] and uniforms[request][length] < profile[length]:
            length += 1
        fill = [-1] * (len(block) - length)
        lens.append(length)
        tokens.append([*block[:length], judged.bonus_tokens[request].item(), *fill])
    return lens, tokens


@pytest.mark.parametrize("form", [simulated_accept, simulated_accept_ref])
@pytest.mark.parametrize(("bs", "gamma"), [(1, 0), (1, 1), (3, 5), (17, 7), (130, 4)])
def test_drafts_are_kept_up_to_the_first_unlucky_one(form, bs, gamma, device):
    arguments = case(bs, gamma, device)
    lens, tokens = one_by_one(*arguments)
    accepted = form(*arguments)
    assert accepted.accepted_lens.tolist() == lens
    assert accepted.out_tokens.tolist() == tokens
    assert torch.equal(accepted.bonus_tokens, arguments[0].bonus_tokens)
    assert accepted.new_seq_lens.tolist() == [500 + length + 1 for length in lens]


def test_a_step_on_the_device_draws_the_same(device):
    ahead = simulated_accept(*case(17, 7, device))
    staged = simulated_accept(*case(17, 7, device, step=torch.tensor(STEP, device=device)))
    assert torch.equal(ahead.out_tokens, staged.out_tokens)
    later = simulated_accept(*case(17, 7, device, step=STEP + 1))
    assert not torch.equal(ahead.out_tokens, later.out_tokens)


def test_positions_are_kept_as_often_as_they_should_be(device):
    """Exact binomial tests at 1e-4: fewer than one run in a thousand fails by chance, and the seed is fixed."""
    judged, drafts, _, profile, keys = case(2000, 7, device)
    accepted = simulated_accept_ref(judged, drafts, torch.full((2000,), 7, device=device), profile, keys)
    lens = accepted.accepted_lens
    for slot, probability in enumerate(PROFILE):
        reached, kept = int((lens >= slot).sum()), int((lens > slot).sum())
        if reached and 0 < probability < 1:
            assert stats.binomtest(kept, reached, probability).pvalue > 1e-4
        else:
            assert kept == reached * probability
    assert (lens == 5).sum() > 100
