"""The distribution a token is drawn from: the law of SGLang 0.5.15's pytorch sampling backend.

softmax(logits / T) in float32; top-k and top-p jointly on the sorted probabilities (a token stays when fewer than k tokens
precede it and their mass is at most p); min-p relative to the most likely token; renormalise.

SGLang leaves it to the sort which of several equally likely tokens survive at the cut. 16-bit logits tie often, and a
seeded request must not depend on who shares its batch, so here the lowest token id wins.
"""

import torch

from .sampling_params import NO_TOP_K, LawParams

# Sorting a row of 49152 costs 2.8 ms on one core, its 1024 largest 0.31 ms; top-p rarely keeps more than a few hundred.
_HEAD_SIZE = 1024


def target_probs(logits: torch.Tensor, law: LawParams) -> torch.Tensor:
    """Probabilities of the next token under each row's temperature and filters.

    Args:
        logits: [n, V], any float dtype, not modified; -inf marks forbidden tokens.
        law: parameters of the n rows.

    Returns:
        [n, V] float32, every row sums to 1 up to rounding.
    """
    probs = torch.softmax(logits.float() / law.temperatures[:, None], dim=-1)
    if not law.max_kept and not law.any_min_p:
        return probs
    # Before the cut, because SGLang compares with the most likely token, which no cut removes.
    floor = probs.amax(-1, keepdim=True) * law.min_ps[:, None] if law.any_min_p else None
    if law.max_kept:
        probs.masked_fill_(~_kept_by_cut(probs, law), 0.0)
    if floor is not None:
        probs.masked_fill_(probs < floor, 0.0)
    return probs.div_(probs.sum(-1, keepdim=True))


def _kept_by_cut(probs: torch.Tensor, law: LawParams) -> torch.Tensor:
    """[n, V] bool: tokens that top-k and top-p leave."""
    head = _largest_probs(probs, law)
    cut_rows = (law.top_ks < NO_TOP_K) | (law.top_ps < 1.0)
    num_kept = _kept_in_head(head, law).sum(-1, keepdim=True)
    lowest = head.gather(-1, num_kept - 1)
    # Tokens above the lowest kept probability all stay; of those that equal it, as many as there is room for.
    room = num_kept - (head > lowest).sum(-1, keepdim=True)
    ties = probs == lowest
    kept = (probs > lowest) | (ties & (ties.cumsum(-1) <= room))
    return kept | ~cut_rows[:, None]


def _kept_in_head(head: torch.Tensor, law: LawParams) -> torch.Tensor:
    """[n, width] bool: which of the descending probabilities `head` survive top-k and top-p."""
    mass_before = head.cumsum(-1) - head
    rank = torch.arange(head.shape[-1], device=head.device)
    # Rounding lets a cumulative sum pass 1, which must not turn "no top-p" into a filter.
    top_ps = law.top_ps.masked_fill(law.top_ps >= 1.0, torch.inf)
    return (rank < law.top_ks[:, None]) & (mass_before <= top_ps[:, None])


def _largest_probs(probs: torch.Tensor, law: LawParams) -> torch.Tensor:
    """[n, width] float32, descending; wide enough to hold every row's cut."""
    vocab_size = probs.shape[-1]
    if law.max_kept <= _HEAD_SIZE:
        return probs.topk(min(law.max_kept, vocab_size)).values
    if probs.device.type == "cpu" and vocab_size > _HEAD_SIZE:  # elsewhere reading the answer back would stall
        head = probs.topk(_HEAD_SIZE).values
        limited = (law.top_ks <= _HEAD_SIZE) | (law.top_ps >= 1.0) & (law.top_ks >= NO_TOP_K)
        if bool((limited | ~_kept_in_head(head, law)[:, -1]).all()):
            return head
    return probs.sort(dim=-1, descending=True).values
