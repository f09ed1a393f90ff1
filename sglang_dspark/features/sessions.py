"""Sessions: what a turn leaves behind for the next one is what was shown, and has K/V."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.sglang_types import Req

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.session.session_controller import Session, SessionReqNode
    from sglang.srt.session.streaming_session import StreamingSession


@hook(
    "sglang.srt.session.session_controller.Session.create_req",
    HookType.AROUND,
    where="any_worker",
    reason="tokens after an end, which a step may commit, would become part of the next turn's prompt; turns that "
    "replace all others, and refused ones with pictures, would end the server; refused ones would change their session",
    by=Moment.SOME_TIME,
)
def make_turn(
    create: Callable[..., Req], session: Session, turn: TokenizedGenerateReqInput, *args: object, **kwargs: object
) -> Req:
    """Make a request of a session's turn; one that is refused leaves the session as it was.

    A turn that replaces all others ends them once it is made: SGLang would change its table of turns while it reads it,
    and before it looks at the turn.

    SGLang would place the pictures of a refused turn after a prompt that it has dropped, and end. In a streaming
    session it takes the end of any turn for that of the one that runs, and lets the next turn run at the same time.
    """
    for node in session.req_nodes.values():
        # A step may commit tokens after the one that ends a request. They are no part of its answer, and SGLang would
        # put them into the next prompt.
        if node.req.finished() and node.req.finished_len is not None:
            del node.req.output_ids[node.req.finished_len :]
    assert turn.session_params is not None, "SGLang makes turns of requests that name a session"
    others = session.req_nodes
    if turn.session_params.replace and turn.session_params.rid is None:
        session.req_nodes = {}
    req = create(session, turn, *args, **kwargs)
    if req.to_finish is not None:
        session.req_nodes, turn.mm_inputs = others, None
        if session.streaming:
            req.session = None
    elif session.req_nodes is not others:
        for node in others.values():
            node.abort()
    return req


@hook(
    "sglang.srt.session.session_controller.SessionReqNode.clear",
    HookType.REPLACE,
    where="any_worker",
    reason="the server ends if one of the turns after a replaced one has the name of another, or they are a thousand",
    by=Moment.SOME_TIME,
)
def end_turns_after(node: SessionReqNode, nodes: dict[str, SessionReqNode]) -> None:
    """End a turn and all that came after it, and take them out of their session, however long it is.

    A request may have the name of an earlier one, which ``nodes`` no longer has.
    """
    found: list[SessionReqNode] = [node]
    for one in found:
        found += one.children
        one.abort()
        name = one.req.rid
        if nodes.get(name) is one:
            del nodes[name]


@hook(
    "sglang.srt.session.session_controller.Session.finish_req",
    HookType.AROUND,
    where="any_worker",
    reason="SGLang takes a retracted turn for one that has ended, and lets another one run at the same time",
    by=Moment.SOME_TIME,
)
def finish_if_ended(finish: Callable[[Session, Req], None], session: Session, req: Req) -> None:
    """Have a streaming session go on after a turn once the turn has ended, and not if it was only retracted."""
    if req.finished():
        finish(session, req)


@hook(
    "sglang.srt.session.streaming_session.StreamingSession.try_match_prefix",
    HookType.BEFORE,
    where="any_worker",
    reason="the K/V of a retracted turn stays in its session, which may go on without the turn",
    by=Moment.SOME_TIME,
)
def release_dropped(sessions: StreamingSession, params: MatchPrefixParams) -> None:
    """Release the K/V of a streaming session if it goes beyond the turns that have ended.

    It is that of a turn that was retracted, and then aborted while it waited. The next turn begins without it.
    """
    req = params.req
    session = None if req is None else req.session
    if req is None or session is None or not session.streaming or req.is_retracted:
        return
    slot = sessions.slots.get(session.session_id)
    if slot is None or slot.kv is req.kv:
        return
    ended = (session.committed_origin_len or 0) + sum(len(node.req.output_ids) for node in session.req_nodes.values())
    if slot.kv.kv_committed_len > ended:
        sessions.release_session(session.session_id)


@hook(
    "sglang.srt.session.streaming_session.StreamingSession.try_cache_finished_req",
    HookType.AFTER,
    where="any_worker",
    reason="SGLang takes a reserved slot for the K/V of a turn's last token, which no step has written",
    by=Moment.SOME_TIME,
)
def encode_last_token_again(kept: bool, sessions: StreamingSession, req: Req) -> None:
    """Have the next turn of a streaming session begin with the last token of the turn that has ended.

    The last token of a text has no K/V unless another step has begun. SGLang keeps all that is allocated up to it, and
    a speculative step allocates beyond it.

    Args:
        kept: whether the session has kept the K/V of the turn.
    """
    if kept and req.session is not None:
        record, end = sessions.slots[req.session.session_id].kv, len(req.origin_input_ids) + len(req.output_ids)
        record.kv_committed_len = min(record.kv_committed_len, max(end - 1, len(req.origin_input_ids)))


FEATURE = Feature(
    __name__,
    is_used=lambda args: True,
)
