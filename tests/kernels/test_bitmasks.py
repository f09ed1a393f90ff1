"""Bit masks of grammars against a loop over bits."""

import pytest
import torch
from dspark_kernels import mask_tokens


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
