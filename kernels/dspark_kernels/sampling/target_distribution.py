"""The distribution that a token is drawn from, that of SGLang's pytorch sampling backend.

softmax(logits / T) in float32; top-k and top-p jointly on the sorted probabilities (a token stays when fewer than k
tokens precede it and their mass is at most p); min-p relative to the most likely token; renormalise.

SGLang leaves it to the sort which of several equally likely tokens survive at the cut. 16-bit logits tie often, and a
seeded request must not depend on the other requests of its batch, so here the lowest token id wins.
"""

import torch

from dspark_kernels.sampling.parameters import NO_TOP_K, FilterParams

# How many of a row's largest probabilities to look at before sorting all of them. At V = 49152 on one core the 512
# largest take 0.19 ms, 8192 take 1.2 ms and the full sort 2.8 ms; top-p keeps some hundred tokens of a typical row and
# thousands of a flat one.
_HEAD_SIZES = (512, 8192)
_MAX_ELEMENTS = 1 << 24  # filtered at a time: some 300 MB while they are


def target_probs(logits: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """Probabilities of the next token under each row's temperature and filters.

    Args:
        logits: [n, V], any float dtype, not modified; -inf marks forbidden tokens.
        params: of the n rows.

    Returns:
        [n, V] float32, every row sums to 1 up to rounding.
    """
    probs = torch.softmax(logits.float() / params.temperatures[:, None], dim=-1)
    if params.max_kept or params.any_min_p:
        # Sorting takes several times the memory of what is sorted, and that was not reserved.
        num_rows = max(1, _MAX_ELEMENTS // probs.shape[-1])
        for start in range(0, len(probs), num_rows):
            part = slice(start, start + num_rows)
            _filter_(probs[part], params.expand(part))
    return probs


def _filter_(probs: torch.Tensor, params: FilterParams) -> None:
    """Apply top-k, top-p and min-p to ``probs`` [n, V], in place."""
    # Taken before the cut, which never removes the most likely token.
    floor = probs.amax(-1, keepdim=True) * params.min_ps[:, None] if params.any_min_p else None
    if params.max_kept:
        _cut_(probs, params)
    if floor is not None:
        probs.masked_fill_(probs < floor, 0.0)
    # float64, and an exact 1 for unfiltered rows: a row's bits must not depend on how a batch's sums are blocked.
    mass = probs.sum(-1, keepdim=True, dtype=torch.float64).float()
    filtered = _is_cut(params) | (params.min_ps > 0)
    probs.div_(mass.masked_fill_(~filtered[:, None], 1.0))


def reads_are_free(tensor: torch.Tensor) -> bool:
    """Whether the host may branch on this tensor's values: on an accelerator it would have to wait for the stream."""
    return tensor.device.type == "cpu"


def _cut_(probs: torch.Tensor, params: FilterParams) -> None:
    """Zero the tokens of ``probs`` [n, V] that top-k and top-p remove, in place."""
    head = _largest_probs(probs, params)
    num_kept = _kept_in_head(head, params).sum(-1, keepdim=True)
    # Padding rows may hold NaN, of which nothing is kept.
    lowest = head.gather(-1, (num_kept - 1).clamp_min(0))
    lowest.masked_fill_(~_is_cut(params)[:, None], 0.0)
    probs.masked_fill_(probs < lowest, 0.0)

    following = head.gather(-1, num_kept.clamp_max(head.shape[-1] - 1))
    tied = (num_kept < head.shape[-1]) & (following == lowest) & (lowest > 0)
    rows = tied.nonzero()[:, 0] if reads_are_free(probs) else torch.arange(probs.shape[0], device=probs.device)
    room = num_kept - (head > lowest).sum(-1, keepdim=True)
    equals = probs[rows] == lowest[rows]
    probs[rows] = probs[rows].masked_fill_(equals & (equals.cumsum(-1) > room[rows]), 0.0)


def _is_cut(params: FilterParams) -> torch.Tensor:
    """[n] bool: rows that have a top-k or a top-p."""
    return (params.top_ks < NO_TOP_K) | (params.top_ps < 1.0)


def _kept_in_head(head: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """[n, width] bool: which of the descending probabilities ``head`` survive top-k and top-p."""
    mass_before = head.cumsum(-1) - head
    rank = torch.arange(head.shape[-1], device=head.device)
    # Rounding lets a cumulative sum pass 1, which must not turn "no top-p" into a filter.
    top_ps = params.top_ps.masked_fill(params.top_ps >= 1.0, torch.inf)
    return (rank < params.top_ks[:, None]) & (mass_before <= top_ps[:, None])


def _largest_probs(probs: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """[n, width] float32, descending; wide enough to hold every row's cut and the first token after it."""
    vocab_size = probs.shape[-1]
    if params.max_kept < _HEAD_SIZES[-1]:
        return probs.topk(min(params.max_kept + 1, vocab_size)).values
    if reads_are_free(probs):
        for size in (size for size in _HEAD_SIZES if size < vocab_size):
            head = probs.topk(size).values
            ends_within = ~_kept_in_head(head, params)[:, -1]
            if bool((ends_within | ~_is_cut(params)).all()):
                return head
    return probs.sort(dim=-1, descending=True).values
