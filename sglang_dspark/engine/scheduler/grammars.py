"""Following grammars along the drafts: which tokens each row of a verification may emit.

SGLang's grammar objects stand after the committed tokens. A walk accepts the drafts one by one, asks for the mask of
every row on the way, and goes back. It ends at the first draft that the grammar forbids: its row gives that draft
probability 0, so nothing behind it is ever committed. SGLang itself advances the grammar over what was committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_BITS = 32


def masks_of(
    reqs: Sequence[Any], windows: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[int], torch.Tensor | None]:
    """Masks of all rows that a grammar governs.

    Args:
        windows: per request the anchor and the drafts under verification, one per row.

    Returns:
        Those rows [m], counted over all windows, and their masks [m, W] int32, bit v set where token v is allowed;
        None where no grammar has a say.
    """
    rows: list[int] = []
    masks: list[torch.Tensor] = []
    start = 0
    for req, window in zip(reqs, windows, strict=True):
        grammar = req.grammar
        if grammar is not None and not grammar.finished:
            bitmask = grammar.allocate_vocab_mask(vocab_size, len(window), "cpu")
            reached = _walk(grammar, window[1:], bitmask)
            rows.extend(range(start, start + reached))
            masks.append(bitmask[:reached])
        start += len(window)
    return rows, torch.cat(masks) if rows else None


def _walk(grammar: Any, drafts: Sequence[int], bitmask: torch.Tensor) -> int:
    """Fill the masks of a window's rows; returns how many have one. The grammar stands where it stood."""
    accepted = row = 0
    while not grammar.is_terminated():
        grammar.fill_vocab_mask(bitmask, row)
        row += 1
        if accepted == len(drafts) or not _allows(bitmask[accepted], drafts[accepted]):
            break
        grammar.accept_token(drafts[accepted])
        accepted += 1
    if accepted:
        grammar.rollback(accepted)
    return row


def _allows(mask: torch.Tensor, token: int) -> bool:
    word = token // _BITS
    return word < mask.shape[0] and bool(int(mask[word]) >> (token % _BITS) & 1)
