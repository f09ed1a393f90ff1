"""Promises in a scheduler: whose drafts count how much, and what became of each promise."""

from array import array
from types import SimpleNamespace

import pytest
from made_schedule import schedule
from promised_requests import asking
from settled_requests import settled
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_objects import ONE_RANK, partly, server_args
from sglang_objects import batch as batch_of

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.server import attach
from sglang_dspark.features.own_worker.server import ScheduledServer
from sglang_dspark.features.promises.keys import PromiseKeys
from sglang_dspark.features.promises.served import OUTCOMES, Promises


def promising(clock, **server):
    return Promises(PromiseKeys(**server), schedule, 3, Agreement(ONE_RANK), clock)


@pytest.fixture
def server():
    clock = SimpleNamespace(ms=1000.0)
    part = promising(clock=lambda: clock.ms)

    def answered(ms, tokens, rounds, **asked):
        """Serve one request of so many tokens beside one that asks for nothing; return their weights on the way."""
        reqs = [asking(**asked), asking()]
        batch = batch_of(*reqs)
        part.prefill_done(batch)
        found = [part.weights(batch)]  # under overlap, the first token is not known yet
        for count in (1, tokens):
            reqs[0].output_ids[:] = array("q", [7] * count)
            found.append(part.weights(batch))
            clock.ms += ms if count == 1 else 0
        reqs[0].spec_verify_ct = rounds
        return reqs[0], found

    return SimpleNamespace(part=part, clock=clock, answered=answered)


def test_steps_of_requests_that_ask_for_nothing_are_not_weighed(server):
    for asked in ({}, {"weight": 1.0}, {"ttft_ms": 5.0}):
        _, weights = server.answered(100.0, 11, 5, **asked)
        assert weights == [None] * 3
    ended, weights = server.answered(100.0, 11, 5, weight=0.2)
    assert weights == [[0.2, 1.0]] * 3
    server.part.request_ended(ended)
    assert server.answered(100.0, 11, 5)[1] == [None] * 3


def test_a_promise_is_kept_or_late_or_was_out_of_reach(server):
    """With three drafts, five steps bring up to 20 tokens: 10 in 100 ms were possible at 6 ms, and not at 4."""
    for tpot_ms in (11.0, 10.0, 6.0, 4.0):
        ended, weights = server.answered(100.0, 11, 5, tpot_ms=tpot_ms)
        assert weights[0] == [1.0, 1.0] and weights[1] == [3.0, 1.0]
        server.part.request_ended(ended)
        *before, said = ended.customized_info["dspark_promise"]
        assert before == [None] * 10
        assert said == {"promised_ms": tpot_ms, "tpot_ms": pytest.approx(10.0), "outcome": said["outcome"]}
    aborted, _ = server.answered(100.0, 11, 5, tpot_ms=4.0)
    aborted.finished_reason = FINISH_ABORT("by its user")
    single, _ = server.answered(100.0, 1, 5, tpot_ms=4.0)
    for ended in (aborted, single, asking(tpot_ms=4.0)):
        server.part.request_ended(ended)
        assert ended.customized_info is None
    answers, late = server.part.counted()
    assert nonzero(answers) == {"tpot_kept": 2, "tpot_late": 1, "tpot_unreachable": 1}
    assert nonzero(late) == pytest.approx({"tpot_late": 0.04, "tpot_unreachable": 0.06})


def test_an_answer_that_comes_beside_prompts_has_a_promise(server):
    """Without a decode step of its own."""
    req = asking(tpot_ms=4.0)
    for ms, tokens in ((0, 0), (0, 1), (20, 2), (20, 3)):
        server.clock.ms += ms
        req.output_ids[:] = array("q", [7] * tokens)
        server.part.prefill_done(batch_of(req))
    req.spec_verify_ct = 2
    server.part.request_ended(req)
    answers, late = server.part.counted()
    assert nonzero(answers) == {"tpot_unreachable": 1}
    assert nonzero(late) == pytest.approx({"tpot_unreachable": 0.032})


@pytest.mark.parametrize("tokens", [1, 3])
def test_what_became_of_a_first_token_is_counted_and_said(server, tokens):
    """The time is that from the arrival; what the prefill alone took says whether it was in reach."""
    for ttft_ms, begun_s in ((250, 10.0), (200, 10.0), (150, 10.1), (150, 10.01)):
        ended, _ = server.answered(100.0, tokens, 1, ttft_ms=ttft_ms)
        times = ended.time_stats
        times.scheduler_recv_time, times.forward_entry_time, times.prefill_finished_time = 10.0, begun_s, 10.2
        server.part.request_ended(ended)
        *before, said = ended.customized_info["dspark_promise"]
        assert before == [None] * (tokens - 1)
        assert said == {
            "promised_ttft_ms": ttft_ms,
            "ttft_ms": pytest.approx(200),
            "ttft_outcome": said["ttft_outcome"],
        }
    answers, late = server.part.counted()
    assert nonzero(answers) == {"ttft_kept": 2, "ttft_late": 1, "ttft_unreachable": 1}
    assert nonzero(late) == pytest.approx({"ttft_late": 0.05, "ttft_unreachable": 0.05})
    aborted, _ = server.answered(100.0, tokens, 1, ttft_ms=5.0)
    aborted.finished_reason = FINISH_ABORT("by its user")
    for ended in (aborted, asking(ttft_ms=5.0)):  # the other one has never begun
        server.part.request_ended(ended)
        assert ended.customized_info is None


def nonzero(counted):
    assert set(counted.values) <= {f"{kind}_{what}" for kind in ("tpot", "ttft") for what in OUTCOMES}
    return {name: value for name, value in counted.values.items() if value}


def test_the_servers_promise_holds_for_requests_without_their_own():
    part = promising(lambda: 0.0, tpot_ms=10.0, ttft_ms=100.0)
    batch = batch_of(asking(), asking(tpot_ms=20.0), asking(weight=0.5, ttft_ms=5.0))
    part.prefill_done(batch)
    paces = [part._paces[req] for req in batch.reqs]
    assert [(pace.tpot_ms, pace.weight) for pace in paces] == [(10, 1), (20, 1), (10, 0.5)]
    assert [part.promised_ms(req) for req in batch.reqs] == [100, 100, 5]
    assert part.out_of_turn(batch.reqs[:1]) == [0] and part.out_of_turn([]) == []


BAD = (0, -1, "5", "", None, True, float("nan"), float("inf"), 2.0**70, 10**400, [1], {})


@pytest.mark.parametrize("key", ["tpot_ms", "ttft_ms", "weight"])
@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:8])
def test_a_bad_value_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"^speculation\.{key} must be a number from 0\.0?1 to"):
        settled({key: value})


def test_sglangs_own_worker_serves_no_promise():
    args = server_args()
    attach(args, ScheduledServer(DSparkConfig(), ""))
    with pytest.raises(ValueError, match=r"^speculation\.tpot_ms=12 is not served by SGLang's own worker"):
        PromiseKeys(tpot_ms=12).for_scheduler({"tpot_ms"}, partly(TokenizerManager, server_args=args))
