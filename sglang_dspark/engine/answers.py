"""What answers tell of their tokens, and where they end.

Log-probabilities of output tokens have the fields and the definition of SGLang's sampler: they are those of the
adjusted logits at the request's temperature, before top-k, top-p and min-p; greedy requests count as temperature 1.
With ``SGLANG_RETURN_ORIGINAL_LOGPROB`` the temperature is left out. Prompt tokens are SGLang's own. SGLang's function
for speculative steps wants as many rows for every request, computes all of them at once, and copies each entry
separately.

When a step brings several tokens of a request, the first of several ends finishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_dspark.engine.batch import DSparkBatchResult, is_running
from sglang_dspark.engine.part import DrawnTokens, Part
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.step.packed import copy_to_host, host_index

# Rows whose log-probabilities are computed together: 160 MB with 152k tokens.
_MAX_ROWS = 256


def with_logprobs(batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens) -> LogitsProcessorOutput:
    """Return SGLang's ``LogitsProcessorOutput`` with the log-probabilities that requests of ``batch`` asked for.

    Args:
        output: its logits are [N, V]. Not modified: a captured graph owns it.

    Returns:
        A copy of ``output``. Lists have an entry per request and slot, empty if it did not ask.
    """
    indptr, tokens, temperatures = drawn
    width = 1 if tokens.ndim == 1 else tokens.shape[1]
    entries = len(batch.reqs) * width
    filled = replace(output, next_token_logprobs=torch.zeros(tokens.shape, device=tokens.device))
    if any(batch.top_logprobs_nums):
        filled.next_token_top_logprobs_val = [torch.empty(0)] * entries
        filled.next_token_top_logprobs_idx = [torch.empty(0, dtype=torch.int64)] * entries
    if any(ids is not None for ids in batch.token_ids_logprobs):
        filled.next_token_token_ids_logprobs_val = [torch.empty(0)] * entries
        filled.next_token_token_ids_logprobs_idx = [[]] * entries
    wanted = [i for i, req in enumerate(batch.reqs) if req.return_logprob]
    at_a_time = max(1, _MAX_ROWS // width)
    for start in range(0, len(wanted), at_a_time):
        requests = wanted[start : start + at_a_time]
        index = host_index(requests, tokens.device)
        logprobs = _logprobs(output.next_token_logits, indptr, index, width, temperatures)
        chosen = logprobs.gather(1, tokens[index].clamp_min(0).view(-1, 1))
        filled.next_token_logprobs[index] = chosen.view(tokens[index].shape)
        if filled.next_token_top_logprobs_val is not None:
            _fill_top(filled, logprobs, width, requests, batch.top_logprobs_nums)
        if filled.next_token_token_ids_logprobs_val is not None:
            _fill_named(filled, logprobs, width, requests, batch.token_ids_logprobs)
    return filled


def _logprobs(
    logits: torch.Tensor, indptr: torch.Tensor, index: torch.Tensor, width: int, temperatures: torch.Tensor
) -> torch.Tensor:
    """Return [m * width, V] float32 of the requests ``index`` [m], slot by slot; slots past its rows mean nothing."""
    rows = (indptr[index, None] + torch.arange(width, device=index.device)).clamp_max(logits.shape[0] - 1)
    scaled = logits[rows.view(-1)].float()
    if not envs.SGLANG_RETURN_ORIGINAL_LOGPROB.get():
        scaled /= temperatures[index].repeat_interleave(width)[:, None]
    # A forbidden token has the smallest finite value: JSON knows no infinity.
    return scaled.log_softmax(-1).clamp_min_(torch.finfo(torch.float32).min)


def _fill_top(
    filled: LogitsProcessorOutput, logprobs: torch.Tensor, width: int, requests: list[int], top_ks: list[int]
) -> None:
    """Enter the most likely tokens of ``logprobs`` [m * width, V], for each of m requests as many as it asked for."""
    largest = max(top_ks[request] for request in requests)
    values, ids = (copy_to_host(part) for part in logprobs.topk(largest, dim=-1))
    for place, request in enumerate(requests):
        rows, entries = (slice(i * width, (i + 1) * width) for i in (place, request))
        filled.next_token_top_logprobs_val[entries] = values[rows, : top_ks[request]].unbind()
        filled.next_token_top_logprobs_idx[entries] = ids[rows, : top_ks[request]].unbind()


def _fill_named(
    filled: LogitsProcessorOutput,
    logprobs: torch.Tensor,
    width: int,
    requests: list[int],
    named: list[list[int] | None],
) -> None:
    """Enter the tokens that the m requests of ``logprobs`` [m * width, V] named."""
    for place, request in enumerate(requests):
        if tokens := named[request]:
            rows, entries = (slice(i * width, (i + 1) * width) for i in (place, request))
            values = copy_to_host(logprobs[rows, host_index(tokens, logprobs.device)])
            filled.next_token_token_ids_logprobs_val[entries] = values.unbind()
            filled.next_token_token_ids_logprobs_idx[entries] = [tokens] * width


class Logprobs(Part):
    """Have answers carry the log-probabilities that requests ask for."""

    def tokens_drawn(
        self, batch: ScheduleBatch, output: LogitsProcessorOutput, drawn: DrawnTokens
    ) -> LogitsProcessorOutput:
        return with_logprobs(batch, output, drawn) if batch.return_logprob else output

    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        """Empty the entries of tokens that were not committed: SGLang makes Python lists of all of them."""
        if not batch.return_logprob:
            return
        output = result.logits_output
        for lists in (
            output.next_token_top_logprobs_val,
            output.next_token_top_logprobs_idx,
            output.next_token_token_ids_logprobs_val,
        ):
            if lists:
                width = len(lists) // len(tokens)
                for request, committed in enumerate(tokens):
                    first, end = request * width + len(committed), (request + 1) * width
                    lists[first:end] = [lists[first][:0]] * (end - first) if first < end else []


class Ends(Part):
    """Let texts end where they would end without speculation."""

    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        let_first_end_count(batch.reqs, tokens)

    def request_ended(self, req: Req) -> None:
        """Take off the reasoning tokens that SGLang has counted after the end, before it looked for it.

        Reasoning stands at the beginning of a text, so it has at most as many tokens as the text.
        """
        req.reasoning_tokens = min(req.reasoning_tokens, len(req.output_ids_through_stop))


def let_first_end_count(reqs: Sequence[Req], runs: Sequence[Sequence[int]]) -> None:
    """Have requests with stop strings, and aborted ones, look for their end token by token, as without speculation.

    Call it before the tokens of a step are appended to their requests. SGLang finds the first stop token, and knows
    which end comes first among stop tokens, lengths and grammars. It looks for stop strings before all of these, also
    for one after a stop token, and for one string after the other. An aborted request would return all tokens of the
    step. Looking token by token costs too much for every request, so those that need it get another
    ``update_finish_state`` for this step.

    Args:
        runs: the tokens of the step, of every request.
    """
    for req, run in zip(reqs, runs, strict=True):
        if len(run) <= 1 or not is_running(req):
            continue
        if req.to_finish or req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs:
            req.update_finish_state = partial(_token_by_token, req)


def _token_by_token(req: Req, new_accepted_len: int) -> None:
    """Take the place of SGLang's method once: call it after each of the last ``new_accepted_len`` output tokens."""
    del req.update_finish_state
    aborted = req.to_finish
    if not (aborted or _may_hold_stop(req, new_accepted_len)):
        req.update_finish_state(new_accepted_len)
        return
    grammar = req.grammar
    run = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    while run and not req.finished():
        req.output_ids.append(run.pop(0))
        # The grammar has read the whole run already, which ends where the grammar does.
        req.grammar = None if run else grammar
        req.update_finish_state(1)
    req.grammar = grammar
    if aborted:
        req.finished_len = len(req.output_ids)
    req.output_ids.extend(run)


def _may_hold_stop(req: Req, new_accepted_len: int) -> bool:
    """Return whether a stop string or expression may match in the request's last tokens."""
    parameters = req.sampling_params
    if parameters.stop_regex_strs:
        return True
    tail = req.tail_str(new_accepted_len)
    return any(stop in tail for stop in parameters.stop_strs)
