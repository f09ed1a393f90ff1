"""Ends a text at the first of several ends when a step brings several tokens of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang_dspark.engine.scheduler.batch import is_running


def look_closely(reqs: Sequence[Any], runs: Sequence[Sequence[int]]) -> None:
    """Have the first of several ends count, as without speculation, if the tokens of a step may hold several.

    Call it with the tokens of every request before they are its own. To look at one by one costs too much for all: a
    request that needs it gets another ``update_finish_state`` for this step.
    """
    for req, run in zip(reqs, runs, strict=True):
        if len(run) <= 1 or not is_running(req):
            continue
        # What stop strings say has to wait for the text.
        if req.to_finish or req.sampling_params.stop_strs or _ends_otherwise(req, len(req.output_ids) + len(run)):
            req.update_finish_state = partial(_token_by_token, req)


def _token_by_token(req: Any, new_accepted_len: int) -> None:
    """Let SGLang look at a request for its end after every one of its last tokens; once in the place of its method.

    SGLang looks at the tokens of a step together, at their number first, then at the grammar, at stop strings, and at
    stop tokens: a stop token would not be seen when the tokens after it fill the request up, complete its grammar, or
    hold a stop string, and what follows it would be returned. A regular expression may match a text and not a longer
    one. An abort would return all of them.

    Args:
        req: a ``Req``; ``output_ids`` end with the step's tokens.
        new_accepted_len: how many these are.
    """
    del req.update_finish_state
    aborted = req.to_finish
    if not (aborted or _ends_otherwise(req, len(req.output_ids)) or _holds_stop(req, new_accepted_len)):
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


def forget_overshoot(session: Any, *args: Any, **kwargs: Any) -> None:
    """Drop what follows an end before SGLang makes a session's next turn out of the turns before. A hook.

    A step may commit tokens behind the one that ends a request. They are no part of its answer, and SGLang would put
    them into the next prompt.
    """
    for node in session.req_nodes.values():
        req = node.req
        if req.finished() and req.finished_len is not None:
            del req.output_ids[req.finished_len :]


def _ends_otherwise(req: Any, length: int) -> bool:
    """Return whether something other than a stop token or string may end the request at ``length`` tokens or before."""
    parameters, grammar = req.sampling_params, req.grammar
    return bool(
        length >= parameters.max_new_tokens
        or parameters.stop_regex_strs
        or (grammar is not None and grammar.is_terminated())
    )


def _holds_stop(req: Any, new_accepted_len: int) -> bool:
    """Return whether a stop string may be in the request's last tokens."""
    stops = req.sampling_params.stop_strs
    if not stops:
        return False
    tail = req.tail_str(new_accepted_len)
    return any(stop in tail for stop in stops)
