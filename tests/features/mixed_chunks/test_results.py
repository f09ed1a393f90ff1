"""Tokens of running requests in a mixed step count as a plain step of theirs, and follow their grammars."""

from types import SimpleNamespace

import pytest
import torch
from made_schedule import schedule
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang_objects import batch, partly, request
from stage_loop import OneRank

from sglang_dspark.engine.draft_input import slots_required
from sglang_dspark.engine.part import Part
from sglang_dspark.engine.step_control import StepControl
from sglang_dspark.features.mixed_chunks import count_running, wait_for_grammars
from sglang_dspark.worker.worker import DSparkWorker


class Looking(Part):
    def __init__(self):
        self.seen = []

    def step_done(self, reqs, record, running, accepted):
        self.seen.append(([req.rid for req in reqs], record, running, accepted))


def under_way(reqs):
    """Note a plain step, as its reservation does."""
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
    assert (record.requests, record.drafted, record.verified, record.drawn) == (["a", "c"], [0, 0], [0, 0], [0, 0])
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
def test_prompts_alone_are_no_step(looking, processor, running):
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
