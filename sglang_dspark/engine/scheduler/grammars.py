"""Grammar masks of a verification: which tokens each row may emit, with SGLang's walk along the drafts.

SGLang's grammar objects stand behind the committed tokens, and its walk returns them there. It ends at the first draft
that the grammar forbids: that row gives the draft probability 0, so nothing behind it is ever committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import traverse_tree

_BITS = 32  # of a word of a mask


def grammar_masks(
    reqs: Sequence[Any], windows: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[int], torch.Tensor | None]:
    """Return the masks of all rows whose request has a grammar.

    Args:
        windows: per request the anchor and the drafts under verification, one per row.

    Returns:
        Those rows [m], counted over all windows, and their masks [m, W] int32, bit v set if token v is allowed; rows
        that the walk does not reach allow everything. No rows and None if no request has a grammar.
    """
    rows: list[int] = []
    masks: list[torch.Tensor] = []
    start = 0
    for req, window in zip(reqs, windows, strict=True):
        num_rows = len(window)
        if req.grammar is not None and not req.grammar.finished:
            mask = req.grammar.allocate_vocab_mask(vocab_size, num_rows, "cpu")
            # A chain: the child of each draft is the next one, and none has a sibling.
            children, siblings = torch.arange(1, num_rows + 1), torch.full((num_rows,), -1)
            children[-1] = -1
            known = min(vocab_size, _BITS * mask.shape[1])  # a model's vocabulary may be larger than its tokenizer's
            traverse_tree(children, siblings, torch.tensor(window), req.grammar, mask, known)
            rows.extend(range(start, start + num_rows))
            masks.append(mask)
        start += num_rows
    return rows, torch.cat(masks) if masks else None
