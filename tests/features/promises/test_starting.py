"""Prompts start by when their first tokens are due, and the one that has begun leaves room for those before it."""

from types import SimpleNamespace

import pytest
import torch
from promised_requests import asking
from sglang.srt.managers.schedule_policy import AddReqResult, CacheAgnosticPolicy, PrefillAdder
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import get_context
from sglang_objects import ONE_RANK, batch, partly, table
from step_tables import memory_bound

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.features.promises.keys import PromiseKeys
from sglang_dspark.features.promises.served import Promises
from sglang_dspark.features.promises.starting import start_by_promise
from sglang_dspark.fence import FAILURES
from sglang_dspark.scheduling.step_times import StepTimes
from sglang_dspark.worker.worker import DSparkWorker

CHUNK = 64


def prompt(rid, rows, arrived_s=0.0, priority=0, **asked):
    """A request with a prompt of so many tokens."""
    made = asking(prompt=[(97 * ord(rid) + place) % 1000 for place in range(rows)], rid=rid, **asked)
    made.time_stats.scheduler_recv_time = made.time_stats.wait_queue_entry_time = arrived_s
    made.priority, made.finished_reason = priority, None
    return made


def policy(name="FCFS", sign=-1):
    return SimpleNamespace(priority_sign=sign, policy=CacheAgnosticPolicy[name])


@pytest.fixture
def passed():
    """A function that makes one pass of a scheduler; it returns the order of the queue, and what is encoded next."""
    cache_of = table(9, 512), TokenToKVPoolAllocator(2048, torch.float32, "cpu", None, need_sort=False)
    cache = RadixCache(CacheInitParams(False, *cache_of, page_size=1))
    schedule = SimpleNamespace(times=None)
    part = Promises(PromiseKeys(), lambda: schedule, 3, Agreement(ONE_RANK))

    def one_pass(queue, begun=None, *, times=None, free=9, chunk=CHUNK, page=1, limit=None, adapters=(), **changes):
        schedule.times = times
        scheduler = SimpleNamespace(
            waiting_queue=queue,
            chunked_req=begun,
            draft_worker=partly(DSparkWorker, parts=[part]),
            enable_priority_scheduling=False,
            enable_lora=bool(adapters),
            can_schedule_lora_req=lambda req, running: req.lora_id in running or len({*running, req.lora_id}) <= 2,
            policy=policy(),
            running_batch=batch(),
            tree_cache=cache,
            is_hybrid_swa=False,
            get_num_allocatable_reqs=lambda running: free,
        )
        vars(scheduler).update(changes)
        kind = start_by_promise(PrefillAdder, scheduler)
        adder = kind(page, cache, cache_of[1], None, 0.5, 10_000, chunk)
        adder.chunked_req_limit = limit
        if begun is not None:
            begun.init_next_round_input()
            begun = adder.add_chunked_req(begun)
        for req in queue:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            if adapters and req.lora_id not in adapters:
                continue
            req.init_next_round_input(cache)
            if adder.add_one_req(req, begun is not None, None) != AddReqResult.CONTINUE:
                break
        assert begun is None or adder.new_chunked_req is None  # SGLang would end the server
        return "".join(req.rid for req in queue), {req.rid: req.extend_len for req in adder.can_run_list}

    one_pass.cache, one_pass.part = cache, part
    with get_context().override_server_args():
        yield one_pass


def test_prompts_that_are_due_overtake_others_and_are_not_cut(passed):
    a, b, c = prompt("a", 40), prompt("b", 90), prompt("c", 20, 0.5, ttft_ms=2000)
    assert passed([a, b]) == ("ab", {"a": 40, "b": 24})
    assert passed([a, b, c]) == ("cab", {"c": 20, "a": 40, "b": 4})


def test_others_are_overtaken_for_ten_seconds(passed):
    late = [prompt("b", 5, 9.0, ttft_ms=1500), prompt("c", 5, 9.0, ttft_ms=500)]
    queue = [prompt("x", 5, 3.0), prompt("a", 5, 0.0), *late]
    assert passed(queue, policy=policy("LOF"))[0] == "cxab"  # where SGLang puts x in front of a


@pytest.mark.parametrize(
    ("changes", "order"),
    [
        ({}, "ba"),
        ({"enable_priority_scheduling": True}, "ab"),
        ({"enable_priority_scheduling": True, "policy": policy("LOF")}, "ab"),
    ],
)
def test_priorities_come_first(passed, changes, order):
    assert passed([prompt("a", 5, priority=2), prompt("b", 5, priority=1, ttft_ms=9)], **changes)[0] == order


@pytest.mark.parametrize(("times", "order"), [(None, "ab"), (StepTimes(memory_bound()), "ba")])
def test_of_equal_promises_that_of_the_longer_prompt_starts_first(passed, times, order):
    """By the table's time of a row among many."""
    assert passed([prompt("a", 5, ttft_ms=900), prompt("b", 50, ttft_ms=900)], times=times)[0] == order


@pytest.mark.parametrize("name", ["FCFS", "LOF"])
def test_what_the_cache_has_does_not_count_as_rows(passed, name):
    """SGLang's usual order does not look for it."""
    long, short = prompt("b", 50, ttft_ms=900), prompt("a", 20, ttft_ms=900)
    passed.cache.insert(InsertParams(RadixKey(long.origin_input_ids[:49]), torch.arange(1, 50)))
    assert passed([long, short], times=StepTimes(memory_bound()), policy=policy(name))[0] == "ab"


def test_a_turn_of_a_streaming_session_is_not_looked_up(passed):
    """SGLang lends what the session holds to one request, which has to start."""
    turn = prompt("a", 50, ttft_ms=900)
    turn.session = SimpleNamespace(streaming=True)
    passed.cache.insert(InsertParams(RadixKey(turn.origin_input_ids[:49]), torch.arange(1, 50)))
    assert passed([turn], prompt("z", 300), free=9)[1] == {"z": 14, "a": 1}


def test_a_cached_prompt_that_is_longer_than_a_chunk_has_room(passed):
    """Others may have cached it since it came."""
    first, second = prompt("a", 100, ttft_ms=900), prompt("b", 100, ttft_ms=900)
    assert passed([first, second], prompt("z", 300))[1] == {"z": 64}
    for req, end in ((first, 90), (second, 95)):
        passed.cache.insert(InsertParams(RadixKey(req.origin_input_ids[:end]), torch.arange(1, end + 1)))
    assert passed([first, second], prompt("y", 300))[1] == {"y": 49, "a": 10, "b": 5}


def test_what_has_been_read_of_a_promised_prompt_counts_no_more(passed):
    """A quarter of the one that has begun is left, which the other could not wait for if it counted as a whole."""
    times, begun = StepTimes(memory_bound()), prompt("z", 400, ttft_ms=900)
    begun.prefix_len = begun.extend_end = 300
    due = prompt("a", 20, ttft_ms=900 - 200 * times.row_ms)
    assert passed([due], begun, times=times)[1] == {"z": 44, "a": 20}


def test_a_first_token_that_has_come_is_not_promised_again(passed):
    """The request has been retracted."""
    back = prompt("b", 5, ttft_ms=9)
    back.output_ids.append(7)
    back.is_retracted = True
    assert passed([prompt("a", 5), back])[0] == "ab"


@pytest.mark.parametrize(
    ("rows", "changes", "encoded"),
    [
        ([20, 10], {}, {"z": 34, "a": 20, "b": 10}),
        ([20, 60], {}, {"z": 44, "a": 20}),  # b does not fit, and a prompt is cut already
        ([64, 10], {}, {"z": 64}),
        ([63], {}, {"z": 1, "a": 63}),
        ([20], {"is_hybrid_swa": True}, {"z": 64}),
        ([20, 10], {"free": 1}, {"z": 44, "a": 20}),
        ([20], {"free": 0}, {"z": 64}),
    ],
)
def test_a_prompt_that_has_begun_leaves_room_for_those_that_are_due(passed, rows, changes, encoded):
    queue = [prompt(rid, count, ttft_ms=900) for rid, count in zip("ab", rows, strict=False)]
    assert passed([*queue, prompt("c", 200)], prompt("z", 300), **changes)[1] == encoded


def test_a_prompt_that_has_begun_and_is_due_itself_goes_on(passed):
    assert passed([prompt("a", 5, ttft_ms=900)], prompt("z", 300, ttft_ms=800))[1] == {"z": 64}
    begun = prompt("z", 300, priority=1)
    queue = [prompt("a", 5, priority=0, ttft_ms=900)]
    assert passed(queue, begun, enable_priority_scheduling=True)[1] == {"z": 64}


def test_room_that_was_given_in_vain_is_not_given_again(passed):
    """It does not fit into memory, as it turns out."""
    greedy = prompt("a", 20, ttft_ms=900)
    greedy.sampling_params.max_new_tokens = 4000
    assert passed([greedy], prompt("z", 300))[1] == {"z": 44}
    assert passed([greedy], prompt("y", 300))[1] == {"y": 64}


def test_behind_a_request_that_cannot_start_no_room_is_made(passed):
    first, *others = [prompt(rid, 20, ttft_ms=900) for rid in "abc"]
    first.sampling_params.max_new_tokens = 4000
    assert passed([first, *others], prompt("z", 300))[1] == {"z": 4}
    assert passed([first, *others], prompt("y", 300))[1] == {"y": 64}
    assert passed(others, prompt("x", 300))[1] == {"x": 24, "b": 20, "c": 20}


@pytest.mark.parametrize(("free", "encoded"), [(9, {"z": 24, "b": 20, "c": 20}), (1, {"z": 44, "b": 20})])
def test_room_is_made_behind_requests_whose_adapters_have_none(passed, free, encoded):
    """SGLang passes them over, and they take no free row. Two of an adapter that comes have room."""
    queue, running = [prompt(rid, 20, ttft_ms=900) for rid in "abc"], prompt("r", 5)
    for req, adapter in zip([*queue, running], ("red", "green", "green", "green"), strict=True):
        req.lora_id = adapter
    found = passed(queue, prompt("z", 300), free=free, adapters=("green", None), running_batch=batch(running))[1]
    assert found == encoded


def test_one_that_has_started_and_was_retracted_has_room_again(passed):
    first = prompt("a", 20, ttft_ms=900)
    assert passed([first], prompt("z", 300))[1] == {"z": 44, "a": 20}
    passed.part.prefill_done(batch(first))
    first.output_ids.append(7)
    first.reset_for_retract()
    assert passed([first, prompt("b", 5, ttft_ms=900)], prompt("y", 300))[1] == {"y": 38, "a": 21, "b": 5}


@pytest.mark.parametrize("chunk", [64, 48])
def test_promised_prompts_that_do_not_fit_into_one_chunk_have_room_one_after_the_other(passed, chunk):
    queue, begun = [prompt(rid, 40, ttft_ms=900) for rid in "abc"], prompt("z", 600)
    for rid in "abc":
        assert passed(queue, begun, chunk=chunk)[1] == {"z": chunk - 40, rid: 40}
        del queue[0]


def test_a_chunk_that_is_too_short_now_is_no_room_in_vain(passed):
    queue = [prompt("a", 60, ttft_ms=900)]
    assert passed(queue, prompt("z", 300), chunk=48)[1] == {"z": 48}
    assert passed(queue, prompt("y", 300), chunk=128)[1] == {"y": 68, "a": 60}


@pytest.mark.parametrize("asked", [{}, {"ttft_ms": 600_000}])
def test_a_request_that_has_begun_to_answer_goes_first(passed, asked):
    """It was retracted. Others that came before it do not start for its sake, whose first token is not due."""
    [back, begun], late = [prompt(rid, rows, **asked) for rid, rows in (("r", 5), ("y", 300))], prompt("p", 5, 108.5)
    back.time_stats.wait_queue_entry_time = 109.0
    due = prompt("q", 5, 108.5, ttft_ms=200)
    for req in (back, begun):
        req.output_ids.append(7)
        req.is_retracted = True
    assert passed([due, back], prompt("z", 300, ttft_ms=1))[1] == {"z": 58, "r": 6}
    assert passed([late, due], begun)[1] == {"y": 64}
    assert passed([late, due, back])[0] == "rqp"


def test_no_second_prompt_is_cut(passed):
    """SGLang's policy leaves room for others, too, which half of b would take."""
    a = prompt("a", 20, ttft_ms=900)
    assert passed([a, prompt("b", 200)], prompt("z", 300), limit=40)[1] == {"z": 40, "a": 20}


def test_what_the_cache_has_needs_no_room(passed):
    """It has half of a text that was retracted. To order its queue, SGLang matches more of it than it may use."""
    back = prompt("a", 20)
    back.output_ids.extend([7] * 4)
    back.prefix_len, back.num_matched_prefix_tokens = 12, 18
    passed.cache.insert(InsertParams(RadixKey(back.origin_input_ids[:12]), torch.arange(1, 13)))
    queue = [back, prompt("b", 200, ttft_ms=600_000)]
    assert passed(queue, prompt("z", 300, 5.0))[1] == {"z": 52, "a": 12}


def test_room_is_whole_pages(passed):
    """The cache has more than half of the second a. What is left of the chunk is less than the pages that b needs."""
    assert passed([prompt("a", 20, ttft_ms=900)], prompt("z", 300), chunk=60, page=16)[1] == {"z": 16, "a": 20}
    a = prompt("a", 20, ttft_ms=900)
    passed.cache.insert(InsertParams(RadixKey(a.origin_input_ids[:12]), torch.arange(1, 13)))
    queue = [a, prompt("b", 20, ttft_ms=600_000)]
    assert passed(queue, prompt("y", 300), chunk=76, page=16, limit=32)[1] == {"y": 32, "a": 8}


def test_room_that_sglang_leaves_for_other_prompts_stays(passed):
    assert passed([prompt("a", 20, ttft_ms=900)], prompt("z", 300), limit=30)[1] == {"z": 30, "a": 20}


def test_ranks_do_as_the_first_one(passed):
    passed.part.agreement = partly(Agreement, share=lambda planned: ([1, 0], []))
    queue = [prompt("a", 5, ttft_ms=900), prompt("b", 5)]
    assert passed(queue, prompt("z", 300)) == ("ba", {"z": 64})


def test_where_no_prompt_is_promised_anything_all_is_sglangs(passed, monkeypatch):
    queue = [prompt("b", 5, 3.0, tpot_ms=9), prompt("a", 5, 1.0)]
    monkeypatch.setattr(Promises, "start_by_ms", None)
    assert passed(queue, prompt("z", 300, ttft_ms=800)) == ("ba", {"z": 64})


def test_what_fails_leaves_sglangs_order(passed):
    queue = [prompt("a", 5), prompt("b", 5, ttft_ms=9)]
    assert passed(queue, policy=None)[0] == "ab"
    assert FAILURES.pop("orders of prompts") == 1
