"""Running requests beside prompts: which of them ride, and what SGLang is given of them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang_objects import batch, partly, request

from sglang_dspark.engine.batch import DSparkBatchResult
from sglang_dspark.features import short_prompts
from sglang_dspark.features.short_prompts import (
    PART,
    RidingResult,
    RunningBeside,
    ShortPrompts,
    beside,
    keep_apart,
    process_running,
    ride_or_mix,
)
from sglang_dspark.step.decision import PLAIN, StepRecord


class Pool:
    """Batches find the part here."""


def met(blocks, *, found=True):
    """A batch of prompts and a running one that SGLang is about to mix, and whether it has."""
    pool, mixed = Pool(), []
    if found:
        setattr(pool, PART, SimpleNamespace(blocks_beside=lambda prompts, running: blocks))
    prompts = batch(request(rid="p"), req_to_token_pool=pool)
    running = batch(request(rid="a"), request(rid="b"), batch_is_full=False)
    ride_or_mix(lambda *given: mixed.append(given), prompts, running)
    prompts.decoding_reqs = running.reqs  # as SGLang says of all that it has mixed
    return prompts, running, mixed


@pytest.mark.parametrize(("blocks", "found"), [(None, True), (object(), False)])
def test_others_are_mixed(blocks, found):
    prompts, running, mixed = met(blocks, found=found)
    assert mixed == [(prompts, running)] and beside(prompts) is None
    plan = NextBatchPlan(batch_to_run=prompts, running_batch=(empty := batch()))
    keep_apart(plan, object(), running)
    assert plan.running_batch is empty and prompts.decoding_reqs is running.reqs


def test_requests_beside_prompts_stay_the_running_ones():
    prompts, running, mixed = met(blocks := object())
    assert mixed == []
    scheduler, plan = object(), NextBatchPlan(batch_to_run=prompts, running_batch=batch(batch_is_full=True))
    keep_apart(plan, scheduler, running)
    assert plan.batch_to_run is prompts and plan.running_batch is running and running.batch_is_full
    assert prompts.decoding_reqs is None
    found = beside(prompts)
    assert (found.scheduler, found.batch, found.blocks) == (scheduler, running, blocks)
    keep_apart(NextBatchPlan(batch_to_run=None, running_batch=running), scheduler, running)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_step_beside_prompts_is_run_as_sglang_runs_one(monkeypatch, overlap):
    """It begins with what the one before has left, leaves the same to the next one, and is timed as the prompts are."""
    done, rows, before, behind = [], torch.tensor([3, 1]), torch.tensor([7, 9]), torch.tensor([9, 12])
    running = batch(request(), request(), req_pool_indices=rows, seq_lens=before, seq_lens_cpu=before)
    outcome = DSparkBatchResult(
        next_draft_input=SimpleNamespace(), new_seq_lens=behind, record=partly(StepRecord, decision=PLAIN)
    )
    future_map = SimpleNamespace(
        resolve_seq_lens_cpu=lambda batch: done.append("lengths"),
        publish=lambda rows, lens: done.append((rows, lens)),
    )
    monkeypatch.setattr(short_prompts, "resolve_forward_inputs", lambda *given: done.append("inputs"))

    def step(batch, publish):
        publish(behind)
        done.append("step")
        return outcome

    found = RunningBeside(running, object())
    found.scheduler = SimpleNamespace(
        enable_overlap=overlap,
        future_map=future_map,
        _forward_isolation=lambda batch, overlap: nullcontext(),
        _relay_forward_payload=lambda *given: done.append("relayed"),
    )
    timed = {"forward_iter": 5, "launch_ts": 1.5, "after_idle_gap": True}
    result = found.decode(batch(**timed), step)
    beside_it, processed = result.running
    assert processed is outcome and beside_it is not running and not found.drafted
    assert running.spec_info is outcome.next_draft_input
    assert {name: getattr(beside_it, name) for name in timed} == timed
    assert any(kept is before for kept in result.extra_keep_alive_refs)
    if overlap:
        assert done == ["lengths", "inputs", (rows, behind), "step", "relayed"]
        assert running.spec_info.future_indices is rows
    else:
        assert done == ["inputs", "step"]
        assert running.seq_lens is behind and running.seq_lens_cpu.tolist() == [9, 12]


def test_the_step_beside_prompts_is_processed_too_and_counted():
    pool, processed = Pool(), []
    part = partly(ShortPrompts, _prompts={}, _drafts={"verified": 0, "accepted": 0})
    setattr(pool, PART, part)
    running = batch(req_to_token_pool=pool)
    outcome = DSparkBatchResult(accept_lens=torch.tensor([3, 1]), cap_lens=torch.tensor([5, 3]))
    scheduler = SimpleNamespace(process_batch_result=lambda *given: processed.append(given))
    process_running(None, scheduler, batch(), RidingResult(running=(running, outcome)))
    assert processed == [(running, outcome)]
    assert part.counted()[1].values == {"verified": 6, "accepted": 2}
    process_running(None, scheduler, batch(), outcome)
    assert len(processed) == 1


def test_both_results_are_copied():
    outcome = DSparkBatchResult(next_token_ids=torch.tensor([1]))
    running = batch(return_logprob=False, return_hidden_states=False)
    result = RidingResult(next_token_ids=torch.tensor([2]), running=(running, outcome))
    result.copy_done = torch.get_device_module("cpu").Event()
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    outcome.copy_done.synchronize()


def test_what_running_requests_ask_for_is_copied(monkeypatch):
    asked = []
    monkeypatch.setattr(DSparkBatchResult, "copy_to_cpu", lambda result, **what: asked.append(what))
    running = batch(return_logprob=True, return_hidden_states=True)
    result = RidingResult(next_token_ids=torch.tensor([2]), running=(running, DSparkBatchResult()))
    result.copy_done = torch.get_device_module("cpu").Event()
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    assert asked == [{"return_logprob": True, "return_hidden_states": True}]
