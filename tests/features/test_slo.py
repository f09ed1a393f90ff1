"""SLOs in a scheduler: whose drafts count how much, and what became of each SLO."""

import math
from array import array
from types import SimpleNamespace

import msgspec
import pytest
from golden_server import settled
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_objects import batch as batch_of
from sglang_objects import partly, request, server_args
from step_tables import schedule

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.request_options import KEY
from sglang_dspark.engine.server import attach
from sglang_dspark.features.builtin_worker import ScheduledServer
from sglang_dspark.features.slo import SloKeys, Slos


def asking(**asked):
    """SGLang's request with these options."""
    options = msgspec.json.encode({"slo": SloKeys(**asked)}).decode()
    made = request((), (0,), "r", custom_params={KEY: options} if asked else None)
    made.finished_reason = FINISH_LENGTH(9)
    return made


def worker_with(tpot_ms):
    return SimpleNamespace(options=DSparkConfig(tpot_ms=tpot_ms), schedule=schedule(), max_verify=3)


@pytest.fixture
def server():
    clock = SimpleNamespace(ms=1000.0)
    part = Slos(worker_with(None), lambda: clock.ms)

    def answered(ms, tokens, rounds, **asked):
        """Serve one request of so many tokens next to one that asks for nothing; return their weights on the way."""
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
    for asked in ({}, {"weight": 1.0}):
        _, weights = server.answered(100.0, 11, 5, **asked)
        assert weights == [None] * 3
    ended, weights = server.answered(100.0, 11, 5, weight=0.2)
    assert weights == [[0.2, 1.0]] * 3
    server.part.request_ended(ended)
    assert server.answered(100.0, 11, 5)[1] == [None] * 3


def test_an_slo_is_met_or_missed_or_infeasible(server):
    """With three drafts, five steps bring up to 20 tokens: 10 in 100 ms were possible at 6 ms, and not at 4."""
    for tpot_ms in (11.0, 10.0, 6.0, 4.0):
        ended, weights = server.answered(100.0, 11, 5, tpot_ms=tpot_ms)
        assert weights[0] == [1.0, 1.0] and weights[1] == [3.0, 1.0]
        server.part.request_ended(ended)
        *before, found = ended.customized_info["dspark_slo"]
        assert before == [None] * 10
        assert found == {"slo_tpot_ms": tpot_ms, "tpot_ms": pytest.approx(10.0), "outcome": found["outcome"]}
    aborted, _ = server.answered(100.0, 11, 5, tpot_ms=4.0)
    aborted.finished_reason = FINISH_ABORT("by its user")
    single, _ = server.answered(100.0, 1, 5, tpot_ms=4.0)
    for ended in (aborted, single, asking(tpot_ms=4.0)):
        server.part.request_ended(ended)
        assert ended.customized_info is None
    [counted] = server.part.counted()
    assert counted.values == {"met": 2, "missed": 1, "infeasible": 1}


def test_an_answer_that_comes_with_the_prompts_of_others_has_an_slo(server):
    """Without a decode step of its own."""
    req = asking(tpot_ms=4.0)
    for ms, tokens in ((0, 0), (0, 1), (20, 2), (20, 3)):
        server.clock.ms += ms
        req.output_ids[:] = array("q", [7] * tokens)
        server.part.prefill_done(batch_of(req))
    req.spec_verify_ct = 2
    server.part.request_ended(req)
    [counted] = server.part.counted()
    assert counted.values == {"met": 0, "missed": 0, "infeasible": 1}


def test_the_servers_slo_holds_for_requests_without_their_own():
    part = Slos(worker_with(10.0))
    batch = batch_of(asking(), asking(tpot_ms=20.0), asking(weight=0.5))
    part.prefill_done(batch)
    states = [part._states[req] for req in batch.reqs]
    assert [(state.tpot_ms, state.base_weight) for state in states] == [(10, 1), (20, 1), (10, 0.5)]


BAD = (0, -1, "5", "５０👍🏽", "", None, True, float("nan"), float("inf"), 2.0**70, 10**400, [1], {})


@pytest.mark.parametrize("key", ["tpot_ms", "weight"])
@pytest.mark.parametrize("value", BAD, ids=lambda value: repr(value)[:8])
def test_a_bad_value_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=rf"^speculation\.{key} must be a number from 0\.0?1 to"):
        settled({key: value})


@pytest.mark.parametrize(("least_ms", "remedy"), [(20.0, "=20; name that or more"), (math.inf, "=inf; drop the key")])
def test_an_operator_says_how_short_an_slo_may_be(least_ms, remedy):
    with pytest.raises(ValueError, match=rf"^speculation\.tpot_ms=19\.9 .*--speculative-dspark-min-tpot-ms{remedy}"):
        settled({"tpot_ms": 19.9}, min_tpot_ms=least_ms)
    settled({"weight": 0.5}, min_tpot_ms=least_ms)
    if least_ms < math.inf:
        settled({"tpot_ms": 20}, min_tpot_ms=least_ms)


def test_sglangs_own_worker_serves_no_slo():
    args = server_args()
    attach(args, ScheduledServer(DSparkConfig()))
    with pytest.raises(ValueError, match=r"^speculation\.tpot_ms=12 is not served by SGLang's own worker"):
        SloKeys(tpot_ms=12).for_scheduler({"tpot_ms"}, partly(TokenizerManager, server_args=args))
