"""Let the first of several ends finish a request when a step brings several of its tokens."""

from collections.abc import Sequence
from functools import partial

from sglang_dspark.engine.batch import DSparkBatchResult, is_running
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch


class Ends(Part):
    """Let texts end where they would end without speculation."""

    def tokens_come(self, batch: ScheduleBatch, result: DSparkBatchResult, tokens: Sequence[Sequence[int]]) -> None:
        let_first_end_count(batch.reqs, tokens)

    def request_ended(self, req: Req) -> None:
        """Take off the reasoning tokens that SGLang has counted behind the end, before it looked for it.

        Reasoning stands at the beginning of a text, so it has at most as many tokens as the text.
        """
        req.reasoning_tokens = min(req.reasoning_tokens, len(req.output_ids_through_stop))


def let_first_end_count(reqs: Sequence[Req], runs: Sequence[Sequence[int]]) -> None:
    """Have requests with stop strings, and aborted ones, look for their end token by token, as without speculation.

    Call it before the tokens of a step are appended to their requests. SGLang finds the first stop token, and knows
    which end comes first among stop tokens, lengths and grammars. It looks for stop strings before all of these, also
    for one behind a stop token, and for one string after the other. An aborted request would return all tokens of the
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
