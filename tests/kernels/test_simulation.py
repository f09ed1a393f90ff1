"""Acceptance by chance, held against numpy: what is kept of a text, how often, and what confidences say of it."""

import numpy as np
import pytest
import torch
from dspark_kernels import QUANTILES, SPAN, SimulatedDraws, mask_tokens, simulated_accept, simulated_confidence

from sglang_dspark.scheduling.simulated_acceptance import acceptance_probabilities, kept_rates

# Acceptance by position, given all before (DSpark, Fig. 2, Qwen3-4B); the largest and the least that can be kept.
CHAT = (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761)
MATHEMATICS = (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882)
MIXED = (0.842, 0.833, 0.829, 0.83, 0.834, 0.839, 0.831)
FIXED = (1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
TOKENS = 2000
BOTH = pytest.mark.parametrize("form", [simulated_accept, simulated_accept.reference], ids=["kernel", "torch"])


def philox(key, counter):
    """The four words of Philox-4x32-10, by the unsigned arithmetic of numpy."""
    c0, c1, c2, c3 = (np.broadcast_to(np.asarray(word, np.uint64), np.broadcast(*counter).shape) for word in counter)
    k0, k1, low = np.asarray(key, np.uint64), np.uint64(0), np.uint64(2**32 - 1)
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = second >> np.uint64(32) ^ c1 ^ k0, second & low, first >> np.uint64(32) ^ c3 ^ k1, first & low
        k0, k1 = k0 + np.uint64(0x9E3779B9) & low, k1 + np.uint64(0xBB67AE85) & low
    return c0, c1, c2, c3


class Texts:
    """Whole blocks along the texts of many requests, by numpy.

    Attributes:
        lens: [n, TOKENS] drafts kept of a block whose anchor stands there, -1 where none does.
        probabilities: [n, TOKENS, gamma] by which they are kept.
    """

    def __init__(self, quantiles, keys):
        gamma, places = len(quantiles), np.arange(1, TOKENS + len(quantiles) + 1)
        keys = np.asarray(keys)[:, None]
        own, choice, luck, _ = philox(keys, (5 << 16, places, 0, 0))
        shared, *_ = philox(keys, (5 << 16, places // SPAN, 1, 0))
        quantile = (np.where(choice >= 2**31, shared, own) * QUANTILES >> np.uint64(32)).astype(int)
        luck = (luck >> np.uint64(8)) / 2**24
        behind = np.arange(TOKENS)[:, None] + np.arange(gamma)
        self.probabilities = quantiles[np.arange(gamma), quantile[:, behind]]
        kept = luck[:, behind] < self.probabilities
        whole = kept.cumprod(axis=2).sum(axis=2)
        self.lens, anchor = np.full(whole.shape, -1), np.zeros(len(keys), int)
        while (running := np.flatnonzero(anchor < TOKENS)).size:
            self.lens[running, anchor[running]] = found = whole[running, anchor[running]]
            anchor[running] += found + 1


def outcome(form, quantiles, keys, anchors, drafts, lens=None):
    """Return what ``form`` keeps of ``drafts`` whose anchors stand there."""
    rows = torch.arange(len(keys), device=drafts.device).flip(0)
    draws = SimulatedDraws(torch.tensor(keys[::-1].copy(), device=drafts.device), quantiles.to(drafts.device))
    return form(draws, rows, anchors.to(drafts.device), drafts, torch.full_like(rows, 7), lens)


@BOTH
@pytest.mark.parametrize("rates", [CHAT, FIXED])
def test_what_is_kept_is_what_numpy_says(form, rates, device):
    quantiles, keys = torch.from_numpy(acceptance_probabilities(rates)), np.arange(40) * 10**8 + 3
    texts = Texts(quantiles.numpy(), keys)
    blocks = texts.lens[:, :200] >= 0
    anchors = torch.tensor([int(np.flatnonzero(row)[-1]) for row in blocks])
    drafts = torch.arange(280, device=device).view(40, 7) + 50
    found = outcome(form, quantiles, keys, anchors, drafts)
    expected = texts.lens[np.arange(40), anchors]
    assert found.accept_lens.tolist() == expected.tolist()
    assert found.new_seq_lens.tolist() == (anchors + expected + 1).tolist()
    for tokens, block, length in zip(found.out_tokens.tolist(), drafts.tolist(), expected.tolist(), strict=True):
        assert tokens == [*block[:length], 7, *[-1] * (7 - length)]
    # What is not verified is not kept, and what is, is kept as before.
    lens = torch.arange(40, device=device) % 8
    cut = outcome(form, quantiles, keys, anchors, drafts, lens)
    assert cut.accept_lens.tolist() == np.minimum(expected, lens.cpu()).tolist()


@pytest.mark.parametrize("form", [simulated_confidence, simulated_confidence.reference], ids=["kernel", "torch"])
def test_confidences_are_the_probabilities(form, device):
    quantiles, keys = torch.from_numpy(acceptance_probabilities(CHAT)), np.arange(9) * 77
    draws = SimulatedDraws(torch.tensor(keys, device=device), quantiles.to(device))
    rows = torch.arange(9, device=device)
    found = form(draws, rows, torch.full_like(rows, 100), 7).sigmoid().cpu()
    expected = Texts(quantiles.numpy(), keys).probabilities[:, 100]
    torch.testing.assert_close(found, torch.tensor(expected).clamp(1e-4, 1 - 1e-4), atol=1e-5, rtol=0)


def auc(scores, kept):
    """Area under the ROC curve: how often a kept draft has a larger score than one that is not."""
    order = np.unique(scores, return_inverse=True)[1]
    ranks = np.cumsum(np.bincount(order)) - (np.bincount(order) - 1) / 2
    positives = int(kept.sum())
    return (ranks[order][kept].sum() - positives * (positives + 1) / 2) / (positives * (len(kept) - positives))


@pytest.mark.parametrize("rates", [CHAT, MIXED, MATHEMATICS], ids=["chat", "mixed", "mathematics"])
def test_rates_are_kept_and_confidences_know_something(rates):
    """Rates within three standard errors; trained heads have an AUC of 0.81 to 0.91."""
    quantiles = acceptance_probabilities(rates)
    np.testing.assert_allclose(kept_rates(quantiles.astype(float)), rates, atol=1e-6)
    texts = Texts(quantiles, np.random.default_rng(0).integers(0, 2**32, 300))
    lens, probabilities = texts.lens[texts.lens >= 0], texts.probabilities[texts.lens >= 0]
    for slot, rate in enumerate(rates):
        reached = lens >= slot
        kept = lens[reached] > slot
        # Drafts of a stretch are alike, so the error is that between texts.
        of_text = [((row > slot).sum(), (row >= slot).sum()) for row in texts.lens]
        off = np.array([found - rate * seen for found, seen in of_text])
        assert abs(off.sum()) < 3 * np.sqrt((off**2).sum())
        assert 0.84 < auc(probabilities[reached, slot], kept) < 0.89


def test_extreme_rates_are_kept_to_the_letter():
    quantiles = acceptance_probabilities(FIXED)
    assert (quantiles[:3] == 1).all() and (quantiles[3:] == 0).all()
    assert kept_rates(acceptance_probabilities((1.0, 0.5, 0.75)).astype(float)) == pytest.approx(
        (1.0, 0.5, 0.75), abs=1e-6
    )


@pytest.mark.parametrize(("vocab_size", "words"), [(1, 1), (32, 1), (70, 3), (70, 2), (257, 9)])
def test_only_allowed_tokens_keep_their_logits(vocab_size, words, device):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=generator)
    bitmask = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    rows = [4, 0, 2]
    expected = logits.clone()
    for row, mask in zip(rows, bitmask.tolist(), strict=True):
        for token in range(vocab_size):
            if token // 32 >= words or not mask[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    masked = logits.to(device)
    mask_tokens(masked, torch.tensor(rows, device=device), bitmask.to(device))
    assert torch.equal(masked.cpu(), expected)
    assert torch.equal(masked[[1, 3]].cpu(), logits[[1, 3]])
