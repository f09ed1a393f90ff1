"""A turn leaves to the next one of its session the tokens that were shown, and K/V that steps have written."""

from unittest.mock import Mock

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session, SessionReqNode
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession

from sglang_dspark.features.sessions import (
    encode_last_token_again,
    end_turns_after,
    finish_if_ended,
    make_turn,
    release_dropped,
)

PROMPT = [3, 4, 5]


def turn(session, output, finished_len=None):
    req = Req("r", "", PROMPT, SamplingParams(), vocab_size=8, session=session)
    req.output_ids.extend(output)
    req.finished_len = finished_len
    if finished_len is not None:
        req.finished_reason = "stop"
    return req


def test_a_session_goes_on_after_what_was_sent():
    """The tokens that a step committed after the end are no part of the next prompt."""
    session = Session(1000)
    ended, running = turn(session, [1, 7, 2, 3], finished_len=2), turn(session, [4, 5])
    session.req_nodes = {"ended": SessionReqNode(ended), "running": SessionReqNode(running)}
    make_turn(lambda *_: turn(session, []), session, Mock(session_params=SessionParams()))
    assert [list(req.output_ids) for req in (ended, running)] == [[1, 7], [4, 5]]


@pytest.mark.parametrize("rid", [None, "first"])
def test_turns_are_replaced_however_many_there_are(rid):
    """Some of them have the same name; those that run end."""
    session, node = Session(1000), None
    for number in range(3000):
        req = turn(session, [1], finished_len=1 if number % 2 else None)
        req.rid = str(number % 2000) if number else "first"
        session.req_nodes[req.rid] = node = SessionReqNode(req, node)
    running = [node.req for node in session.req_nodes.values() if not node.req.finished()]
    make_turn(lambda *_: turn(session, []), session, Mock(session_params=SessionParams(rid=rid, replace=True)))
    if rid is not None:
        end_turns_after(session.req_nodes[rid], session.req_nodes)
    assert session.req_nodes == {} and running
    assert all(isinstance(req.to_finish, FINISH_ABORT) for req in running)


@pytest.mark.parametrize(
    ("output", "committed", "kept"), [([6], 4, 3), ([6, 1, 2], 6, 5), ([6, 1, 2], 4, 4), ([6, 1], 4, 4), ([], 3, 3)]
)
def test_the_last_token_of_a_turn_is_encoded_with_the_next_one(output, committed, kept):
    session = Session(1000, "s", streaming=True)
    sessions = StreamingSession(Mock())  # a cache, which it does not ask
    slot = sessions.slots["s"] = SessionSlot()
    slot.kv.kv_committed_len = committed
    encode_last_token_again(False, sessions, turn(session, output))
    assert slot.kv.kv_committed_len == committed
    encode_last_token_again(True, sessions, turn(session, output))
    assert slot.kv.kv_committed_len == kept


@pytest.mark.parametrize(
    ("streaming", "refused", "stays"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_a_refused_turn_is_none_of_its_session(streaming, refused, stays):
    """Its end would let another turn in while one runs, and its pictures have no place in its prompt."""
    session = Session(1000, "s", streaming=streaming)
    req, asked = turn(session, []), Mock(mm_inputs="pictures", session_params=SessionParams(replace=True))
    session.req_nodes = before = {"ended": SessionReqNode(turn(session, [1], finished_len=1))}
    req.to_finish = FINISH_ABORT() if refused else None
    assert make_turn(lambda *_: req, session, asked) is req
    assert (session.req_nodes is before) is refused
    assert (req.session is session) is stays
    assert (asked.mm_inputs is None) is refused


def test_a_retracted_turn_keeps_its_session_until_it_ends():
    session = Session(1000, "s", streaming=True)
    session._inflight, req = True, turn(session, [1])
    finish_if_ended(Session.finish_req, session, req)
    assert session._inflight
    assert not session.req_nodes
    req.finished_reason = "length"
    finish_if_ended(Session.finish_req, session, req)
    assert req.session is session
    assert not session._inflight


@pytest.mark.parametrize(
    ("committed", "retracted", "its_own", "released"),
    [(5, False, False, False), (6, False, False, True), (6, True, False, False), (6, False, True, False)],
)
def test_a_turn_does_not_read_the_kv_of_one_that_was_dropped(committed, retracted, its_own, released):
    session, cache = Session(1000, "s", streaming=True), Mock()
    ended, req = turn(session, [1, 2], finished_len=2), turn(session, [])
    session.finish_req(ended)
    sessions = StreamingSession(cache)
    sessions.slots["s"] = SessionSlot()
    sessions.slots["s"].kv.kv_committed_len, req.is_retracted = committed, retracted
    if its_own:  # a turn that is encoded in chunks
        req.kv = sessions.slots["s"].kv
    release_dropped(sessions, MatchPrefixParams(key=Mock(), req=req))
    assert ("s" not in sessions.slots) is released
