"""Tests of chunks that are cut so that a step keeps its bound, and of running requests in mixed steps."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_objects import ONE_RANK, batch, found_by, launch_context, partly, request
from stage_loop import OneRank
from step_tables import schedule

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import DECODED_WITH_PREFILL
from sglang_dspark.engine.draft_input import slots_required
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.features.mixed_chunks import BoundedGaps, bound_chunk, count_running, wait_for_grammars
from sglang_dspark.scheduling.policies import ChunkLimit
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.worker.worker import DSparkWorker

BOUND_MS = 50.0


def steps(limit, ms_of, number):
    """Rows and milliseconds of steps of as many rows as the limit allows."""
    found = []
    for _ in range(number):
        found.append((limit.rows, ms_of(limit.rows)))
        limit.learn(*found[-1])
    return found


@pytest.mark.parametrize(
    ("step_ms", "fitting"),
    [
        (lambda rows: 8 + 0.1 * rows, 320),
        (lambda rows: 0.5 * rows, 80),
        (lambda rows: 1 + 0.01 * rows + 1e-5 * rows**2, 1537),
    ],
)
def test_chunks_grow_until_the_bound_is_reached_and_keep_it(step_ms, fitting):
    found = steps(ChunkLimit(BOUND_MS), step_ms, 24)
    assert max(ms for _, ms in found) <= BOUND_MS
    assert found[-1][0] >= 0.95 * fitting


def test_a_bound_that_few_rows_reach_is_kept_from_the_first_chunk_on():
    found = steps(ChunkLimit(10.0), lambda rows: 5 + 0.2 * rows, 12)
    assert 7 < found[-1][1] == max(ms for _, ms in found) <= 10


def test_a_bound_that_a_slower_machine_has_passed_is_reached_from_above():
    limit = ChunkLimit(10.0)
    limit.rows = 64
    assert steps(limit, lambda rows: 5 + 0.09 * rows, 12)[-1][1] == pytest.approx(8, abs=0.5)


def test_the_bound_has_room_for_rows_that_become_dearer_along_a_context():
    limit, context, worst = ChunkLimit(BOUND_MS), 0, 0.0
    while context < 32_000:
        ms = 5 + limit.rows * (0.05 + 2e-5 * context)
        worst, context, rows = max(worst, ms), context + limit.rows, limit.rows
        limit.learn(rows, ms)
    assert 0.8 * BOUND_MS < worst < BOUND_MS


def test_short_prompts_say_nothing_and_outliers_are_forgotten():
    limit = ChunkLimit(BOUND_MS)
    steps(limit, lambda rows: 8 + 0.1 * rows, 24)
    settled = limit.rows
    # Nor do the last rows of a prompt, nor many requests that run.
    for rows, ms in ((3, 8.3), (int(0.6 * settled), 40.0), (4 * settled, 41.0)):
        limit.learn(rows, ms)
        assert limit.rows == settled
    limit.learn(settled, 1e6)
    assert limit.rows == 8  # prompts go on
    assert steps(limit, lambda rows: 8 + 0.1 * rows, 24)[-1][0] >= 0.95 * settled


def test_next_to_drafts_chunks_grow_and_do_not_shrink():
    """Drafts that take too long say nothing about rows; and where prompts never come alone, they do not stay short."""
    limit = ChunkLimit(BOUND_MS)
    limit.rows = 64
    limit.learn(64, 200.0, drafted=True)
    assert limit.rows == 64
    for _ in range(12):
        limit.learn(limit.rows, 8 + 0.1 * limit.rows, drafted=True)
    assert 0.95 * 320 <= limit.rows <= 320


def gaps(rows, times=None, bound_ms=BOUND_MS, page_size=1):
    worker = SimpleNamespace(
        agreement=Agreement(ONE_RANK),
        device=torch.device("cpu"),
        schedule=SimpleNamespace(times=times),
        server_args=SimpleNamespace(page_size=page_size),
    )
    part = BoundedGaps(worker, bound_ms)
    part._limit.rows = rows
    return part


@dataclass
class Running:
    """Requests that run, and the slots that their next step needs."""

    reqs: list[object]
    needed: int = 32
    fits: bool = True

    def new_tokens_required_next_decode(self):
        return self.needed

    def check_decode_mem(self):
        return self.fits

    def filter_batch(self, reqs_to_exclude=(), keep_indices=None):
        kept = range(len(self.reqs)) if keep_indices is None else keep_indices
        self.reqs = [self.reqs[index] for index in kept if self.reqs[index] not in reqs_to_exclude]

    def release_req(self, index, others):
        self.released = self.reqs[index]


def scheduler_of(waiting, chunked, rows):
    """A scheduler with 160 spare slots."""
    return SimpleNamespace(
        chunked_prefill_size=512,
        page_size=16,
        waiting_queue=waiting,
        chunked_req=chunked,
        draft_worker=partly(DSparkWorker, parts=[] if rows is None else [gaps(rows)]),
        token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 100),
        tree_cache=SimpleNamespace(evictable_size=lambda: 60, supports_swa=lambda: False),
        _reqs_finishing_inflight=lambda batch: [req for req in batch.reqs if req == "ends"],
        _add_request_to_queue=lambda req, is_retracted: waiting.append(req),
    )


def chunk_size(scheduler, prefill_delayer_single_pass, running_batch):
    return scheduler.chunked_prefill_size


@pytest.mark.parametrize(
    ("running", "waiting", "chunked", "rows", "chunk"),
    [
        (2, [1], None, 100, 100),
        (2, [], object(), 100, 100),
        (2, [], object(), 9999, 130),  # what the running ones leave
        (140, [], object(), 10, 156),
        (40, [], object(), None, 168),
        (2, [1], None, 9999, 512),  # SGLang's own size
        (40, [1], None, 10, 56),  # a row of each, and a page
        (600, [1], None, None, 616),  # a row of each, and a page
        (2, [1], None, None, 512),
        (0, [1], None, 100, 512),  # no request waits for it
        (2, [], None, 100, 100),  # SGLang may find one whose grammar has been compiled
    ],
)
def test_sglangs_chunk_is_bounded_while_requests_run(running, waiting, chunked, rows, chunk):
    scheduler, running_batch = scheduler_of(waiting, chunked, rows), Running(reqs=[None] * running)
    assert bound_chunk(chunk_size, scheduler, prefill_delayer_single_pass=None, running_batch=running_batch) == chunk
    assert scheduler.chunked_prefill_size == 512


def test_a_prompt_that_has_begun_waits_while_running_requests_need_all_slots():
    """SGLang would give it slots that are not there, and end the server."""
    scheduler, running_batch = scheduler_of([], object(), None), Running(reqs=[None], needed=150)
    found = bound_chunk(chunk_size, scheduler, prefill_delayer_single_pass=None, running_batch=running_batch)
    assert found == (None, running_batch) and scheduler.waiting_queue == []


@pytest.mark.parametrize(
    ("running", "fits", "retracted"),
    [(["r"], False, ["r"]), (["r"], True, []), (["r", "s"], False, []), (["r", "ends"], False, [])],
)
def test_the_last_running_request_is_retracted_for_a_prompt_that_has_begun(running, fits, retracted):
    """SGLang would end it with an error. Of several requests it retracts those that have to be."""
    scheduler, batch = scheduler_of([], object(), None), Running(running, 150, fits)
    assert bound_chunk(chunk_size, scheduler, prefill_delayer_single_pass=None, running_batch=batch) == (None, batch)
    assert scheduler.waiting_queue == retracted
    assert not retracted or (batch.reqs == [] and batch.released == "r")


def test_a_prefill_is_timed_on_the_host_of_a_cpu():
    part = gaps(64, bound_ms=1e9)  # next to which all take nothing
    for rows, waited_for, found in ((64, False, 64), (64, True, 96), (3, True, 96), (96, True, 144)):
        part.prefill_comes(batch())
        part.waited_for = waited_for
        part.prefill_done(batch(extend_num_tokens=rows))
        assert part.rows(2) == found, "no request waits for the first, and few rows say nothing"


@pytest.mark.parametrize(
    ("asked_ms", "page_size", "factor", "least_ms"),
    [
        (50.0, 1, 1.0, 7.5),  # half a millisecond for each of 9 rows, and one for each of 3 blocks
        (48.0, 64, 1.0, 49.5),
        (29.0, 1, 4.0, 30.0),
        (5.0, 1, 1.0, 7.5),
    ],
)
def test_a_server_says_which_gap_it_keeps(asked_ms, page_size, factor, least_ms, caplog):
    caplog.set_level("INFO")
    requests, drafts = [1, 2, 4, 8], [0, 1, 2, 3]
    verify_ms = [[[r + 0.5 * r * (1 + d)] for d in drafts] for r in requests]
    table = SpsTable({}, requests, drafts, [64], np.zeros((4, 4, 1)), np.array(verify_ms))
    times = SimpleNamespace(table=table, common_factor=factor)
    part = gaps(8, times, asked_ms, page_size)
    part.ready()
    kept_ms = max(asked_ms, part.describe()["gaps"]["least_gap_ms"])
    assert part.describe() == {
        "gaps": {"max_gap_ms": asked_ms, "least_gap_ms": pytest.approx(least_ms), "kept_gap_ms": kept_ms}
    }
    said = caplog.records[-1].getMessage()
    assert f"--speculative-dspark-max-gap-ms={asked_ms:g}" in said
    assert (f"{least_ms:.1f} ms is the least bound that can be kept" in said) == (least_ms > asked_ms)


def test_nobody_knows_which_gap_is_kept_without_step_times():
    assert gaps(8).describe()["gaps"] == {"max_gap_ms": BOUND_MS, "least_gap_ms": None, "kept_gap_ms": None}


class Others:
    """Requests in the step of prompts that are not in their batch."""

    def __init__(self, number, drafted):
        self.number, self.drafted = number, drafted

    def __len__(self):
        return self.number


@pytest.mark.parametrize("running", [2, 31, 32, 64, 200])
@pytest.mark.parametrize("drafted", [False, True])
def test_chunks_that_share_steps_with_drafts_grow_however_many_requests_run(running, drafted):
    part = gaps(64, bound_ms=1e9)
    part.waited_for = True
    decoded = Others(running, drafted)
    for _ in range(20):
        prompts = batch(extend_num_tokens=part.rows(running) - running)
        vars(prompts)[DECODED_WITH_PREFILL] = decoded
        part.prefill_comes(prompts)
        part.prefill_done(prompts)
    assert part.rows(running) > 1000


def test_chunks_next_to_requests_that_draft_nothing_shrink():
    """The machine has become slower. Of drafts, the schedule would leave some out."""
    part, decoded = gaps(800, bound_ms=1e-9), Others(2, True)
    part.waited_for = True
    for drafted, found in ((True, 800), (False, 10)):
        decoded.drafted = drafted
        prompts = batch(extend_num_tokens=798)
        vars(prompts)[DECODED_WITH_PREFILL] = decoded
        part.prefill_comes(prompts)
        part.prefill_done(prompts)
        assert part.rows(2) == found


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, False),
        ({"max_gap_ms": 50.0}, True),
        ({"max_gap_ms": 50.0, "enable_mixed_chunk": True, "chunked_prefill_size": 512}, False),
        ({"max_gap_ms": 50.0, "enable_mixed_chunk": True, "chunked_prefill_size": -1}, True),
    ],
)
def test_a_bound_needs_chunks_next_to_running_requests(given, refused):
    said = found_by("bound on gaps", launch_context(**given))
    assert (said is not None) == refused
    assert not refused or "--enable-mixed-chunk" in said


class Looking(Part):
    def __init__(self):
        self.seen = []

    def step_done(self, reqs, record, running, accepted):
        self.seen.append(([req.rid for req in reqs], record, running, accepted))


def under_way(reqs):
    """Note a non-speculative step, as its reservation does."""
    for req in reqs:
        req.dspark_under_way = [1]


@pytest.fixture
def looking():
    return Looking()


@pytest.fixture
def processor(looking):
    """SGLang's processor of results, with our worker."""
    made = schedule()
    control = StepControl(made, OneRank(), [looking], on_gpu=False)
    ours = partly(DSparkWorker, schedule=made, control=control)
    return partly(SchedulerBatchResultProcessor, model_worker=ours)


def test_a_mixed_step_is_a_plain_step_of_the_requests_that_it_finds_running(looking, processor):
    prompt, first, ended, last = (request([7, 8, 9], prompt=[1] * 4, rid=rid) for rid in "pabc")
    ended.finished_reason = FINISH_LENGTH(3)
    result = GenerationBatchResult(next_token_ids=torch.tensor([4, 5, 6, 3]))
    running = [first, ended, last]
    under_way(running)
    assert slots_required(batch(), running, 1) == 2 * 3  # a row that is under way, and the next one
    count_running(processor, batch(prompt, *running, decoding_reqs=running), result)
    assert slots_required(batch(), running, 1) == 3
    [(requests, record, places, accepted)] = looking.seen
    assert (requests, places, accepted) == (["a", "c"], [0, 1], [0, 0])
    assert (record.requests, record.drafted, record.verified, record.from_drafter) == (
        ["a", "c"],
        [0, 0],
        [0, 0],
        [0, 0],
    )
    assert record.traced.tolist() == [[6, 9], [6, 9]]  # tokens before the anchor, and the anchor
    assert record.committed.tolist() == [[5], [3]]
    for req, rounds in ((prompt, 0), (ended, 0), (first, 1), (last, 1)):
        assert (req.spec_verify_ct, req.spec_num_cap_tokens, sum(req.spec_correct_drafts_histogram)) == (rounds,) * 3
    assert first.spec_cap_lens_histogram == [0, 1]


def test_the_anchor_of_a_request_that_ends_is_committed(processor):
    """SGLang counts it after its own ``update_finish_state`` if the request goes on."""
    goes_on, ends = (
        request([7, 8], prompt=[1] * 4, rid=str(length), max_new_tokens=length, stop=[], stop_regex=[])
        for length in (9, 3)
    )
    for req in (goes_on, ends):
        req.kv.kv_committed_len = 5
    result = GenerationBatchResult(next_token_ids=torch.tensor([5, 6]))
    under_way([goes_on, ends])
    count_running(processor, batch(goes_on, ends, decoding_reqs=[goes_on, ends]), result)
    for req in (goes_on, ends):
        for token in (5, 6):  # the second one comes from a step that is not mixed
            req.output_ids.append(token)
            req.update_finish_state()
    assert (goes_on.kv.kv_committed_len, ends.kv.kv_committed_len) == (5, 6)


@pytest.mark.parametrize("running", [None, []])
def test_only_prompts_are_no_step(looking, processor, running):
    count_running(processor, batch(request(), decoding_reqs=running), None)
    assert looking.seen == []


@pytest.mark.parametrize(
    ("mode", "behind", "grammar", "waits"),
    [
        (ForwardMode.MIXED, 1, object(), True),
        (ForwardMode.MIXED, 0, object(), False),
        (ForwardMode.MIXED, 1, None, False),
        (ForwardMode.EXTEND, 1, object(), False),
    ],
)
def test_a_mixed_step_waits_for_the_tokens_that_grammars_of_running_requests_lack(mode, behind, grammar, waits):
    req = request()
    req.grammar = grammar
    scheduler, mixed = SimpleNamespace(result_queue=[None] * behind), batch(req, decoding_reqs=[req], forward_mode=mode)
    assert wait_for_grammars(lambda scheduler, batch, last_batch: False, scheduler, mixed, last_batch=None) is waits
    assert wait_for_grammars(lambda scheduler, batch, last_batch: True, scheduler, None, last_batch=None)
