"""Log-probabilities of output tokens, in the fields and by the definition of SGLang's sampler.

They are those of the adjusted logits at the request's temperature, before top-k, top-p and min-p; greedy requests count
as temperature 1. With ``SGLANG_RETURN_ORIGINAL_LOGPROB`` the temperature is left out. Prompt tokens are SGLang's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from sglang.srt.environ import envs

from sglang_dspark.step.transfers import copy_to_host, host_index

# Rows whose log-probabilities are computed together: 160 MB with 152k tokens.
_MOST_ROWS = 256


def with_logprobs(
    batch: Any,
    output: Any,
    indptr: torch.Tensor,  # [at least bs + 1] int64
    tokens: torch.Tensor,  # [bs] or [bs, w] int64
    temperatures: torch.Tensor,  # [bs] float32
) -> Any:
    """SGLang's ``LogitsProcessorOutput`` with the log-probabilities that requests of ``batch`` asked for.

    Args:
        output: its logits [N, V] are as they were when ``tokens`` were drawn. Not modified: a captured graph owns it.
        indptr: first row of each request; token i of a request was drawn from row i of its rows.
        tokens: tokens committed, of a decode step with -1 behind them.
        temperatures: 1 for greedy requests.

    Returns:
        ``output`` itself if no request asked.
    """
    if not batch.return_logprob:
        return output
    width, bs = 1 if tokens.ndim == 1 else tokens.shape[1], len(batch.reqs)
    chosen = torch.zeros(tokens.shape, device=tokens.device)
    top = named = None
    if any(batch.top_logprobs_nums):
        top = _Lists([torch.empty(0)] * (bs * width), [torch.empty(0, dtype=torch.int64)] * (bs * width))
    if any(ids is not None for ids in batch.token_ids_logprobs):
        named = _Lists([torch.empty(0)] * (bs * width), [[]] * (bs * width))
    wanted = [i for i, req in enumerate(batch.reqs) if req.return_logprob]
    at_a_time = max(1, _MOST_ROWS // width)
    for start in range(0, len(wanted), at_a_time):
        requests = wanted[start : start + at_a_time]
        index = host_index(requests, tokens.device)
        logprobs = _logprobs(output.next_token_logits, indptr, index, width, temperatures)
        chosen[index] = logprobs.gather(1, tokens[index].clamp_min(0).view(-1, 1)).view(tokens[index].shape)
        if top is not None:
            _fill_top(top, logprobs, width, requests, batch.top_logprobs_nums)
        if named is not None:
            _fill_named(named, logprobs, width, requests, batch.token_ids_logprobs)
    filled = replace(output, next_token_logprobs=chosen)
    if top is not None:
        filled.next_token_top_logprobs_val, filled.next_token_top_logprobs_idx = top.values, top.ids
    if named is not None:
        filled.next_token_token_ids_logprobs_val, filled.next_token_token_ids_logprobs_idx = named.values, named.ids
    return filled


def leave_committed(output: Any, committed: Sequence[int]) -> None:
    """Empty the entries of tokens that were not committed: SGLang makes Python lists of all of them.

    Args:
        output: of :func:`with_logprobs`, arrived on the host; the lists that it holds are changed.
        committed: tokens of each request of the batch.
    """
    for lists in (
        output.next_token_top_logprobs_val,
        output.next_token_top_logprobs_idx,
        output.next_token_token_ids_logprobs_val,
    ):
        if lists:
            width = len(lists) // len(committed)
            for request, num_tokens in enumerate(committed):
                first, end = request * width + num_tokens, (request + 1) * width
                lists[first:end] = [lists[first][:0]] * (end - first) if first < end else []


@dataclass
class _Lists:
    """Log-probabilities and their tokens, one entry per request and slot; empty if the request did not ask."""

    values: list[torch.Tensor]
    ids: list[Any]


def named_in_all(token_ids_logprobs: list[list[int] | None]) -> list[list[int] | None]:
    """Tokens named by each request of a batch; none at all instead of None where another request names some."""
    if all(named is None for named in token_ids_logprobs):
        return token_ids_logprobs
    return [named or [] for named in token_ids_logprobs]


def _logprobs(
    logits: torch.Tensor, indptr: torch.Tensor, index: torch.Tensor, width: int, temperatures: torch.Tensor
) -> torch.Tensor:
    """[m * width, V] float32 of the requests ``index`` [m], window by window; the last row again past a window."""
    rows = (indptr[index, None] + torch.arange(width, device=index.device)).clamp_max(logits.shape[0] - 1)
    scaled = logits[rows.view(-1)].float()
    if not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        scaled /= temperatures[index].repeat_interleave(width)[:, None]
    # A forbidden token has the smallest finite value: JSON knows no infinity.
    return scaled.log_softmax(-1).clamp_min_(torch.finfo(torch.float32).min)


def _fill_top(lists: _Lists, logprobs: torch.Tensor, width: int, requests: list[int], top_ks: list[int]) -> None:
    """Enter the most likely tokens of ``logprobs`` [m * width, V], for each of m requests as many as it asked for."""
    most = max(top_ks[request] for request in requests)
    values, ids = (copy_to_host(part) for part in logprobs.topk(most, dim=-1))
    for place, request in enumerate(requests):
        for slot in range(width):
            row, entry, top_k = place * width + slot, request * width + slot, top_ks[request]
            lists.values[entry], lists.ids[entry] = values[row, :top_k], ids[row, :top_k]


def _fill_named(
    lists: _Lists, logprobs: torch.Tensor, width: int, requests: list[int], named: list[list[int] | None]
) -> None:
    """Enter the tokens that the m requests of ``logprobs`` [m * width, V] named."""
    for place, request in enumerate(requests):
        tokens = named[request]
        if not tokens:
            continue
        found = copy_to_host(logprobs[place * width : (place + 1) * width, host_index(tokens, logprobs.device)])
        for slot in range(width):
            lists.values[request * width + slot], lists.ids[request * width + slot] = found[slot], tokens
