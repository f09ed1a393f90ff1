"""Read the masks of a verification, by a walk along its drafts.

SGLang's grammar objects stand behind the committed tokens, and the walk returns them there. It ends at the first draft
that the grammar forbids: that row gives the draft probability 0, so nothing behind it is ever committed. SGLang's own
walk takes tensors for single tokens, and twelve times as long or more.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject

from sglang_dspark.engine.sglang_types import Req

_BITS = 32  # of a word of a mask


def grammar_masks(
    reqs: Sequence[Req], windows: Sequence[Sequence[int]], vocab_size: int
) -> tuple[list[int], torch.Tensor | None]:
    """Return the masks of all rows whose request has a grammar.

    Args:
        windows: per request the anchor and the drafts under verification, one per row.

    Returns:
        Those rows [m], counted over all windows, and their masks [m, W] int32, bit v set if token v is allowed; rows
        that the walk does not reach are left out. No rows and None if no request has a grammar.
    """
    rows: list[int] = []
    masks: list[torch.Tensor] = []
    start = 0
    for req, window in zip(reqs, windows, strict=True):
        if req.grammar is not None and not req.grammar.finished:
            mask = req.grammar.allocate_vocab_mask(vocab_size, len(window), "cpu")
            num_reached = _walk(req.grammar, window[1:], mask)
            rows.extend(range(start, start + num_reached))
            masks.append(mask[:num_reached])
        start += len(window)
    return rows, torch.cat(masks) if rows else None


def _walk(grammar: BaseGrammarObject, drafts: Sequence[int], mask: torch.Tensor) -> int:
    """Fill the masks [1 + len(drafts), W] of the rows that the grammar reaches, and return how many these are."""
    words = mask.numpy()
    accepted = row = 0
    while not grammar.is_terminated():
        grammar.fill_vocab_mask(mask, row)
        row += 1
        if accepted == len(drafts) or not _allows(words[accepted], drafts[accepted]):
            break
        grammar.accept_token(drafts[accepted])
        accepted += 1
    if accepted:
        grammar.rollback(accepted)
    return row


def _allows(words: NDArray[np.int32], token: int) -> bool:
    """Return whether a mask [W] allows a token; the vocabulary of a model may be larger than its tokenizer's."""
    word, bit = divmod(token, _BITS)
    return word < len(words) and bool(int(words[word]) >> bit & 1)
