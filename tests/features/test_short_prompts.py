"""Tests of prompts that are verified, and of running requests that ride with them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.utils import GenerationBatchResult
from sglang_objects import batch, model_config, partly, request, runner, server_args, table
from step_tables import make_table

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.batch import DECODED_WITH_PREFILL, DSparkBatchResult
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.features import short_prompts
from sglang_dspark.features.short_prompts import (
    BESIDE,
    FEATURE,
    PART,
    PREFILLED,
    VERIFIED,
    PrefillAndDecodeResult,
    RunningWithPrefill,
    ShortPrompts,
    decode_with_prefill,
    keep_apart,
    process_running,
    running_with,
)
from sglang_dspark.scheduling.policies import verified_sooner
from sglang_dspark.step.decision import PLAIN, StepRecord, drafted
from sglang_dspark.step.state import TargetOutput
from sglang_dspark.worker.buffers import Tiers


@pytest.mark.parametrize(
    ("options", "device", "used"),
    [
        ({}, "cuda", False),
        ({}, None, False),
        ({}, "cpu", False),
        ({"unproven": ("prompt-rows",)}, "cuda", True),
        ({"unproven": ("prompt-rows",)}, None, True),
        ({"unproven": ("prompt-rows",)}, "cpu", False),
        ({"unproven": ("held-rows",)}, "cuda", False),
        ({"unproven": ("prompt-rows",), "prompt_rows": 0}, "cuda", False),
        ({"prompt_rows": 64}, "cuda", True),
        ({"prompt_rows": 64}, "cpu", True),
    ],
)
def test_it_has_to_be_asked_for(options, device, used):
    """No GPU has run it, and on a CPU it is slower."""
    args = server_args(device=device)
    assert not FEATURE.is_used(args)
    attach(args, DSparkServer(DSparkConfig(**options), None, dummy_draft=False))
    assert FEATURE.is_used(args) == used


@pytest.mark.parametrize(
    ("verify_ms", "rows", "context", "sooner"),
    [
        (lambda r, d, c: 10 + r * (1 + d), 512, 64, True),  # rows cost a prefill as much
        (lambda r, d, c: 10 + 0.01 * r * c, 64, 60, True),
        (lambda r, d, c: 10 + 0.01 * r * c, 64, 80, False),  # each of eight blocks reads the context
        (lambda r, d, c: 10 + 0.01 * r * c, 512, 60, False),
        (lambda r, d, c: 10 + r * (1 + d) + 0.01 * r * c, 64, 80, False),  # their rows are computed in either way
        (None, 128, 999, True),
        (None, 129, 0, False),
    ],
)
def test_prompts_are_verified_if_that_takes_no_longer_than_a_prefill(verify_ms, rows, context, sooner):
    contexts = {"contexts": (0, 1024), "requests": (1, 64)}
    table = verify_ms and make_table(verify_ms, lambda r, d, c: 100 * (d > 0), gamma=7, **contexts)
    assert verified_sooner(table, rows // 8, rows, context) == sooner


def part(asked=None, *, graphs=True, depth=7, verify=None, args=None, **target):
    """The part of a worker with blocks of 8 rows, and graphs of up to 4 requests if any; it returns what fits."""
    captured = SimpleNamespace(tiers=Tiers.of([1, 4], depth)) if graphs else None
    made = SimpleNamespace(
        max_verify=7,
        options=DSparkConfig(prompt_rows=asked),
        device=torch.device("cpu"),
        model_runner=runner(
            model_config=model_config(**target),
            max_running_requests=8,
            req_to_token_pool=table(4, 40),
            device="cpu",
            spec_algorithm=None,
        ),
        verify=verify,
        server_args=server_args(**(args or {})),
        schedule=SimpleNamespace(times=None),
        executors=SimpleNamespace(captured=captured),
        drafter=SimpleNamespace(num_drawn=depth),
    )
    found = ShortPrompts.of(made)
    if found is not None:
        found.ready()
    return found


def prompts(*rows, running=0, reqs=None, **asked):
    """A batch of prompts of so many rows, the last ``running`` of which are requests that run."""
    reqs = reqs or [request() for _ in rows]
    usual = {"return_logprob": False, "is_prefill_only": False, "input_embeds": None, "hicache_consumer_index": -1}
    given = {"extend_lens": list(rows), "prefix_lens": [0] * len(rows), "extend_num_tokens": sum(rows)}
    return batch(*reqs, decoding_reqs=reqs[len(rows) - running :], **(usual | given | asked))


@pytest.mark.parametrize(
    ("given", "asked", "verified"),
    [
        ({}, [32], True),
        ({}, [8, 8, 9], True),
        ({}, [8, 8, 8, 8], True),
        ({}, [33], False),  # more rows than any graph has
        ({}, [9, 9, 9], False),  # more blocks
        ({"asked": 16}, [17], False),
        ({"asked": 16}, [16], True),
        ({"depth": 0}, [3, 1], True),  # without a drafter: a row for each request
        ({"depth": 0}, [5], False),
        ({"graphs": False}, [1], False),
        ({"graphs": False, "asked": 100}, [40, 24], True),
        ({"graphs": False, "asked": 100}, [40, 25], False),  # more blocks than SGLang runs requests
    ],
)
def test_prompts_that_graphs_have_room_for(given, asked, verified):
    assert (part(**given)._blocks(prompts(*asked)) is not None) == verified


@pytest.mark.parametrize(
    ("given", "asked", "running", "rides"),
    [
        ({}, [8, 8], 2, True),
        ({}, [8, 9], 2, False),  # a request more than any graph has
        ({}, [16], 2, True),
        ({}, [17], 2, False),
        ({"depth": 0}, [1], 1, False),  # nothing is drafted
        ({"graphs": False, "asked": 100}, [40], 3, True),
        ({"graphs": False, "asked": 100}, [40], 4, False),
        ({"asked": 3}, [4], 1, False),
    ],
)
def test_prompts_that_graphs_have_room_for_next_to_whole_blocks(given, asked, running, rides):
    found = part(**given)
    for changes in ({}, {"has_grammar": True}, {"multimodal_inputs": [SimpleNamespace()]}):
        decoding = batch(*[request()] * running, **({"has_grammar": False, "multimodal_inputs": None} | changes))
        blocks = found.blocks_with(prompts(*asked), decoding)
        assert (blocks is not None) == (rides and not changes)


def test_running_requests_next_to_prompts_are_no_prompts():
    found = part(asked=1)
    found.encode(prompts(5, 1, 1, running=2))
    assert found.counted()[0].values == {VERIFIED: 0, PREFILLED: 1, BESIDE: 0}


@pytest.mark.parametrize(
    "asked",
    [
        {"return_logprob": True},
        {"return_hidden_states": True},
        {"is_prefill_only": True},
        {"input_embeds": torch.zeros(3, 4)},
        {"multimodal_inputs": [SimpleNamespace()]},
        {"hicache_consumer_index": 0},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_only_a_prefill_does(asked):
    assert part().encode(prompts(3, **asked)) is None


def test_prompts_that_need_prefills_whatever_they_ask_for():
    """Recurrent layers go through a prompt once, and SGLang finds experts in its own forwards."""
    assert part(architecture="Qwen3NextForCausalLM") is None
    assert part(args={"enable_return_routed_experts": True}) is None


def test_plain_graphs_have_a_row_for_each_request():
    assert len(part(depth=0)._blocks(prompts(3, 1))) == 4
    assert len(part()._blocks(prompts(3, 1))) == 2


def test_a_verification_of_prompts():
    """Of a prompt after a prefix, and a request that has ended in its step: only SGLang's batch knows its row."""
    given = []

    def verify(rows):
        given.append(rows)
        numbers = torch.arange(16.0)[:, None]  # of a tier that has room for more
        output = LogitsProcessorOutput(next_token_logits=numbers.repeat(1, 9))
        plan = SimpleNamespace(indptr=torch.tensor([0, 8, 9, 10]), positions=torch.arange(16))
        rows.read(plan, TargetOutput(output, 100 + numbers), 0)
        return True

    found, reqs = part(verify=verify), [request(), request()]
    sizes = {"extend_lens": [9, 1], "prefix_lens": [20, 5], "extend_num_tokens": 10}
    ids, table_rows = torch.arange(30, 40), torch.tensor([3, 1])
    encoded = found.encode(prompts(9, 1, running=1, reqs=reqs, input_ids=ids, req_pool_indices=table_rows, **sizes))
    [rows] = given
    step, (draft, decision) = rows.step, drafted(rows.tokens, rows.ranks, rows.num_drafts)
    assert step.anchors.tolist() == [30, 38, 39] and step.prefix_lens.tolist() == [20, 28, 5]
    assert step.req_pool_indices.tolist() == [3, 3, 1] and step.batch.reqs == [reqs[0], reqs[0], reqs[1]]
    assert step.batch.seq_lens_cpu.tolist() == [20, 28, 5]
    selected = decision.select(draft)
    assert draft.block.tokens[0].tolist() == list(range(31, 38)) and selected.verify_lens.tolist() == [7, 0, 0]
    assert decision.max_drafts(3) == 7 and step.keeps_logits
    output = encoded.result.logits_output
    assert output.next_token_logits[:, 0].tolist() == [8, 9]
    assert output.hidden_states[:, 0].tolist() == list(range(100, 110))
    assert encoded.input_ids is ids and encoded.positions.tolist() == list(range(10))


def test_the_time_of_a_step_with_prompts_is_none_of_a_step():
    found, forgotten = part(), []
    vars(found._worker).update(decode=print)
    vars(found._worker.schedule).update(invalidate=lambda: forgotten.append(True))

    def decode(prompts, step):
        output = LogitsProcessorOutput(next_token_logits=torch.zeros(3, 9))
        plan = SimpleNamespace(indptr=torch.tensor([0]), positions=torch.arange(3))
        step.keywords["extra"].read(plan, TargetOutput(output, torch.zeros(3, 1)), 0)
        return GenerationBatchResult()

    asked = prompts(3, input_ids=torch.arange(3), req_pool_indices=torch.tensor([1]))
    running = batch(request(), has_grammar=False, multimodal_inputs=None)
    vars(asked)[DECODED_WITH_PREFILL] = partly(
        RunningWithPrefill, blocks=found.blocks_with(asked, running), decode=decode
    )
    assert found.encode(asked) is not None and forgotten == [True]
    assert found.counted()[0].values == {VERIFIED: 0, PREFILLED: 0, BESIDE: 1}


class Pool:
    """Batches find the part here."""


def met(blocks, *, found=True):
    """A batch of prompts and a running one that SGLang is about to mix, and whether it has."""
    pool, mixed = Pool(), []
    if found:
        setattr(pool, PART, SimpleNamespace(blocks_with=lambda prompts, running: blocks))
    prompts = batch(request(rid="p"), req_to_token_pool=pool)
    running = batch(request(rid="a"), request(rid="b"), batch_is_full=False)
    decode_with_prefill(lambda *given: mixed.append(given), prompts, running)
    prompts.decoding_reqs = running.reqs  # as SGLang says of all that it has mixed
    return prompts, running, mixed


@pytest.mark.parametrize(("blocks", "found"), [(None, True), (object(), False)])
def test_others_are_mixed(blocks, found):
    prompts, running, mixed = met(blocks, found=found)
    assert mixed == [(prompts, running)] and running_with(prompts) is None
    plan = NextBatchPlan(batch_to_run=prompts, running_batch=(empty := batch()))
    keep_apart(plan, object(), running)
    assert plan.running_batch is empty and prompts.decoding_reqs is running.reqs


def test_requests_next_to_prompts_stay_the_running_ones():
    prompts, running, mixed = met(blocks := object())
    assert mixed == []
    scheduler, plan = object(), NextBatchPlan(batch_to_run=prompts, running_batch=batch(batch_is_full=True))
    keep_apart(plan, scheduler, running)
    assert plan.batch_to_run is prompts and plan.running_batch is running and running.batch_is_full
    assert prompts.decoding_reqs is None
    found = running_with(prompts)
    assert (found.scheduler, found.batch, found.blocks) == (scheduler, running, blocks)
    keep_apart(NextBatchPlan(batch_to_run=None, running_batch=running), scheduler, running)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_step_with_prompts_is_run_as_sglang_runs_one(monkeypatch, overlap):
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

    found = RunningWithPrefill(running, object())
    found.scheduler = SimpleNamespace(
        enable_overlap=overlap,
        future_map=future_map,
        _forward_isolation=lambda batch, overlap: nullcontext(),
        _relay_forward_payload=lambda *given: done.append("relayed"),
    )
    timed = {"forward_iter": 5, "launch_ts": 1.5, "after_idle_gap": True}
    result = found.decode(batch(**timed), step)
    decoded, processed = result.running
    assert processed is outcome and decoded is not running and not found.drafted
    assert running.spec_info is outcome.next_draft_input
    assert {name: getattr(decoded, name) for name in timed} == timed
    assert any(kept is before for kept in result.extra_keep_alive_refs)
    if overlap:
        assert done == ["lengths", "inputs", (rows, behind), "step", "relayed"]
        assert running.spec_info.future_indices is rows
    else:
        assert done == ["inputs", "step"]
        assert running.seq_lens is behind and running.seq_lens_cpu.tolist() == [9, 12]


def test_the_step_with_prompts_is_processed_too_and_counted():
    pool, processed = Pool(), []
    part = partly(ShortPrompts, _prompts={}, _drafts={"verified": 0, "accepted": 0})
    setattr(pool, PART, part)
    running = batch(req_to_token_pool=pool)
    outcome = DSparkBatchResult(accept_lens=torch.tensor([3, 1]), cap_lens=torch.tensor([5, 3]))
    scheduler = SimpleNamespace(process_batch_result=lambda *given: processed.append(given))
    process_running(None, scheduler, batch(), PrefillAndDecodeResult(running=(running, outcome)))
    assert processed == [(running, outcome)]
    assert part.counted()[1].values == {"verified": 6, "accepted": 2}
    process_running(None, scheduler, batch(), outcome)
    assert len(processed) == 1


def test_both_results_are_copied():
    outcome = DSparkBatchResult(next_token_ids=torch.tensor([1]))
    running = batch(return_logprob=False, return_hidden_states=False)
    result = PrefillAndDecodeResult(next_token_ids=torch.tensor([2]), running=(running, outcome))
    result.copy_done = torch.get_device_module("cpu").Event()
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    outcome.copy_done.synchronize()


def test_what_running_requests_ask_for_is_copied(monkeypatch):
    asked = []
    monkeypatch.setattr(DSparkBatchResult, "copy_to_cpu", lambda result, **what: asked.append(what))
    running = batch(return_logprob=True, return_hidden_states=True)
    result = PrefillAndDecodeResult(next_token_ids=torch.tensor([2]), running=(running, DSparkBatchResult()))
    result.copy_done = torch.get_device_module("cpu").Event()
    result.copy_to_cpu(return_logprob=False, return_hidden_states=False)
    assert asked == [{"return_logprob": True, "return_hidden_states": True}]
