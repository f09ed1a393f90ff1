"""The leading tokens of strided tiles."""

import torch
from draft_support import leading_of_tiles


def test_every_tile_keeps_its_best_token():
    logits = torch.tensor([[0.0, 5.0, 2.0, 1.0, 4.0, 3.0, 9.0], [3.0, 0.0, 0.0, 3.0, 1.0, 2.0, 3.0]])
    kept = leading_of_tiles(logits, 3)  # tiles 0 3 6, 1 4, 2 5
    assert [row.isfinite().nonzero().flatten().tolist() for row in kept] == [[1, 5, 6], [0, 4, 5]]
    assert torch.equal(kept[kept.isfinite()], logits[kept.isfinite()])


def test_as_many_tiles_as_tokens_keep_everything():
    logits = torch.randn(2, 3, 11)
    assert torch.equal(leading_of_tiles(logits, 11), logits)
    assert torch.equal(leading_of_tiles(logits, 64), logits)
