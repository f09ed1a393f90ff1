"""What a turn leaves to the next one of its session: the tokens that were shown, and K/V that steps have written."""

from unittest.mock import Mock

import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session, SessionReqNode
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession

from sglang_dspark.features.sessions.turns import encode_last_token_again, forget_overshoot

PROMPT = [3, 4, 5]


def turn(session, output, finished_len=None):
    req = Req("r", "", PROMPT, SamplingParams(), vocab_size=8, session=session)
    req.output_ids.extend(output)
    req.finished_len = finished_len
    if finished_len is not None:
        req.finished_reason = "stop"
    return req


def test_a_session_goes_on_behind_what_was_sent():
    """The tokens that a step committed behind the end are no part of the next prompt."""
    session = Session(1000)
    ended, running = turn(session, [1, 7, 2, 3], finished_len=2), turn(session, [4, 5])
    session.req_nodes = {"ended": SessionReqNode(ended), "running": SessionReqNode(running)}
    forget_overshoot(session)
    assert [list(req.output_ids) for req in (ended, running)] == [[1, 7], [4, 5]]


@pytest.mark.parametrize(("output", "committed", "kept"), [([6], 4, 3), ([6, 1, 2], 6, 5), ([6, 1], 4, 4), ([], 3, 3)])
def test_the_last_token_of_a_turn_is_encoded_with_the_next_one(output, committed, kept):
    session = Session(1000, "s", streaming=True)
    sessions = StreamingSession(Mock())  # a cache, which it does not ask
    slot = sessions.slots["s"] = SessionSlot()
    slot.kv.kv_committed_len = committed
    encode_last_token_again(False, sessions, turn(session, output))
    assert slot.kv.kv_committed_len == committed
    encode_last_token_again(True, sessions, turn(session, output))
    assert slot.kv.kv_committed_len == kept
