"""Log-probabilities of output tokens, in the fields and by the definition of SGLang's sampler.

They are those of the adjusted logits at the request's temperature, before top-k, top-p and min-p; greedy requests count
as temperature 1. With ``SGLANG_RETURN_ORIGINAL_LOGPROB`` the temperature is left out. Prompt tokens are SGLang's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sglang.srt.environ import envs

from sglang_dspark.engine.batch import copy_to_host
from sglang_dspark.worker.host_index import host_index


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
        ``output`` itself where nobody asked.
    """
    if not batch.return_logprob:
        return output
    width = 1 if tokens.ndim == 1 else tokens.shape[1]
    wanted = [i for i, req in enumerate(batch.reqs) if req.return_logprob]
    index = host_index(wanted, tokens.device)
    logprobs = _logprobs(output.next_token_logits, indptr, index, width, temperatures)
    chosen = torch.zeros(tokens.shape, device=logprobs.device)
    chosen[index] = logprobs.gather(1, tokens[index].clamp_min(0).view(-1, 1)).view(tokens[index].shape)
    filled = replace(output, next_token_logprobs=chosen)

    top_ks = [batch.top_logprobs_nums[i] for i in wanted]
    if any(top_ks):
        values, ids = (copy_to_host(part) for part in logprobs.topk(max(top_ks), dim=-1))
        filled.next_token_top_logprobs_val = _by_token(len(batch.reqs), width, wanted, top_ks, values)
        filled.next_token_top_logprobs_idx = _by_token(len(batch.reqs), width, wanted, top_ks, ids)
    if any(batch.token_ids_logprobs[i] is not None for i in wanted):
        filled.next_token_token_ids_logprobs_val, filled.next_token_token_ids_logprobs_idx = _of_named_tokens(
            batch, logprobs, width, wanted
        )
    return filled


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


def _by_token(bs: int, width: int, wanted: list[int], top_ks: list[int], rows: torch.Tensor) -> list[torch.Tensor]:
    """[bs * width] lists: of ``rows`` [m * width, k] the first entries that each request asked for, none for others."""
    parts = [rows.new_empty(0)] * (bs * width)
    for place, (request, top_k) in enumerate(zip(wanted, top_ks, strict=True)):
        for slot in range(width):
            parts[request * width + slot] = rows[place * width + slot, :top_k]
    return parts


def _of_named_tokens(
    batch: Any, logprobs: torch.Tensor, width: int, wanted: list[int]
) -> tuple[list[torch.Tensor], list[list[int]]]:
    """Values and ids [bs * width] of the tokens that requests named."""
    values = [torch.empty(0)] * (len(batch.reqs) * width)
    ids: list[list[int]] = [[]] * (len(batch.reqs) * width)
    for place, request in enumerate(wanted):
        named = batch.token_ids_logprobs[request]
        if not named:
            continue
        found = copy_to_host(logprobs[place * width : (place + 1) * width, host_index(named, logprobs.device)])
        for slot in range(width):
            values[request * width + slot] = found[slot]
            ids[request * width + slot] = named
    return values, ids
