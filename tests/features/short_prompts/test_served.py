"""Prompts that are verified, and those that are not."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang_objects import batch, model_config, partly, request, runner, server_args, table
from step_tables import make_table

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.batch import RIDERS
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.features.short_prompts import BESIDE, FEATURE, PREFILLED, VERIFIED, RunningBeside, ShortPrompts
from sglang_dspark.scheduling.policies import verified_sooner
from sglang_dspark.step.decision import drafted
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
def test_prompts_that_graphs_have_room_for_beside_whole_blocks(given, asked, running, rides):
    found = part(**given)
    for changes in ({}, {"has_grammar": True}, {"multimodal_inputs": [SimpleNamespace()]}):
        decoding = batch(*[request()] * running, **({"has_grammar": False, "multimodal_inputs": None} | changes))
        blocks = found.blocks_beside(prompts(*asked), decoding)
        assert (blocks is not None) == (rides and not changes)


def test_running_requests_beside_prompts_are_no_prompts():
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
    assert part()._blocks(prompts(3)) is not None
    assert part().encode(prompts(3, **asked)) is None


def test_prompts_that_need_prefills_whatever_they_ask_for():
    """Recurrent layers go through a prompt once, and SGLang finds experts in its own forwards."""
    assert part(architecture="Qwen3NextForCausalLM") is None
    assert part(args={"enable_return_routed_experts": True}) is None


def test_plain_graphs_have_a_row_for_each_request():
    assert len(part(depth=0)._blocks(prompts(3, 1))) == 4
    assert len(part()._blocks(prompts(3, 1))) == 2


def test_a_verification_of_prompts():
    """Of a prompt behind a prefix, and a request that has ended beside it: only SGLang's batch knows its row."""
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


def test_the_time_of_a_step_beside_prompts_is_none_of_a_step():
    found, forgotten = part(), []
    vars(found._worker).update(decode=print)
    vars(found._worker.schedule).update(invalidate=lambda: forgotten.append(True))

    def decode(prompts, step):
        output = LogitsProcessorOutput(next_token_logits=torch.zeros(3, 9))
        plan = SimpleNamespace(indptr=torch.tensor([0]), positions=torch.arange(3))
        step.keywords["beside"].read(plan, TargetOutput(output, torch.zeros(3, 1)), 0)
        return GenerationBatchResult()

    asked = prompts(3, input_ids=torch.arange(3), req_pool_indices=torch.tensor([1]))
    vars(asked)[RIDERS] = partly(RunningBeside, blocks=found._blocks(asked), decode=decode)
    assert found.encode(asked) is not None and forgotten == [True]
    assert found.counted()[0].values == {VERIFIED: 0, PREFILLED: 0, BESIDE: 1}
