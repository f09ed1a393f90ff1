"""Keep the tokens of a session's turns that were shown, and the K/V that steps have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dspark.engine.sglang_types import Req

if TYPE_CHECKING:
    from sglang.srt.session.session_controller import Session
    from sglang.srt.session.streaming_session import StreamingSession


def forget_overshoot(session: Session, *args: object, **kwargs: object) -> None:
    """Drop the tokens behind the end of a session's requests before SGLang makes the next turn out of them.

    A step may commit tokens behind the one that ends a request. They are no part of its answer, and SGLang would put
    them into the next prompt.
    """
    for node in session.req_nodes.values():
        req = node.req
        if req.finished() and req.finished_len is not None:
            del req.output_ids[req.finished_len :]


def encode_last_token_again(kept: bool, sessions: StreamingSession, req: Req) -> None:
    """Have the next turn of a streaming session begin with the last token of the turn that has ended.

    The last token of a text has no K/V unless another step has begun. SGLang keeps all that is allocated up to it, and
    a speculative step allocates beyond it.

    Args:
        kept: whether the session has kept the K/V of the turn.
    """
    if kept:
        record, end = sessions.slots[req.session.session_id].kv, len(req.origin_input_ids) + len(req.output_ids)
        record.kv_committed_len = min(record.kv_committed_len, max(end - 1, len(req.origin_input_ids)))
