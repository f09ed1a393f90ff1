"""Tests of prompts that are verified: cut into blocks, next to running requests, none decides about a draft."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import DraftBlock, RoundKeys, SamplingBatch
from sglang_objects import model_config, request, runner, table
from stage_loop import OneRank, StageLoop
from target_distribution import distribution_error, half_of, one_of_two
from toy_pair import GAMMA, ToyLoop

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.features.short_prompts.verification import Blocks, PromptRows
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import EarlyStop, FixedLength, Threshold, TopK
from sglang_dspark.step.state import Confidence, DecodeBatch, DraftOutput, RequestLimits
from sglang_dspark.worker.eager import EagerExecutor, ExtraRowsExecutor
from sglang_dspark.worker.graphs import ExecutorSelector

CPU = torch.device("cpu")
LENGTHS, CONTEXTS = [9, 1, 3], [20, 0, 2]  # of prompts
ROWS = sum(LENGTHS)


def worker_of(eager: EagerExecutor, requests: int = 8, columns: int = 60) -> SimpleNamespace:
    """A worker without graphs."""
    made = runner(
        model_config=model_config(), req_to_token_pool=table(requests, columns), device="cpu", spec_algorithm=None
    )
    return SimpleNamespace(model_runner=made, device=CPU, executors=ExecutorSelector(eager))


def rows_of_prompts(worker: SimpleNamespace, width: int, first_id: int = 1000) -> PromptRows:
    blocks = Blocks.of(LENGTHS, CONTEXTS, width)
    batch = SimpleNamespace(
        input_ids=first_id + torch.arange(ROWS), req_pool_indices=torch.tensor([5, 6, 7]), reqs=[request()] * 3
    )
    return PromptRows.of(worker, batch, blocks, width)


def step_of(requests: int) -> DecodeBatch:
    rows = torch.arange(requests)
    return DecodeBatch(
        anchors=100 + rows,
        prefix_lens=10 + rows,
        req_pool_indices=rows,
        req_to_token=torch.zeros((8, 60), dtype=torch.int32),
        rows=SamplingBatch.by_temperature(requests, None, CPU),
        keys=RoundKeys(0, 0, rows, rows),
        batch=SimpleNamespace(reqs=[request()] * requests, seq_lens_cpu=10 + rows),
    )


def drafts(requests: int, depth: int, generator: torch.Generator) -> DraftOutput:
    """Drafts whose survivals are so few numbers that many are equal."""
    tokens = torch.arange(requests * depth).view(requests, depth)
    conditional = torch.randint(1, 3, (requests, depth), generator=generator) / 2
    block = DraftBlock(tokens, confidence_logits=torch.logit(conditional.clamp_max(0.99)))
    return DraftOutput(block, Confidence(None, conditional.cumprod(1)), [depth] * requests)


def decisions(requests: int, depth: int):
    for budget in (0, 1, requests, requests * depth // 2):
        yield StepDecision(depth, TopK(budget))
        yield StepDecision(depth, TopK(min(budget + depth, requests * depth), probe_request=requests - 1))
        yield StepDecision(depth, TopK(budget)).weighted([1.0, *[0.5] * (requests - 1)])
        limits = RequestLimits((0, *[1] * (requests - 1)), tuple([0.7] * requests))
        yield StepDecision(depth, TopK(budget)).within(limits)
    yield StepDecision(depth, FixedLength())
    yield StepDecision(depth, Threshold(0.7))
    yield StepDecision(depth, EarlyStop(tuple(1.0 + 0.1 * n for n in range(requests * depth + 1))))
    yield PLAIN


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("depth", [2, 4])  # as deep as blocks of prompts, or less
def test_prompts_decide_about_no_draft(requests, depth):
    generator, step = torch.Generator().manual_seed(depth), step_of(requests)
    eager = EagerExecutor(None, None, None, Agreement(OneRank()))
    for decision in decisions(requests, depth):
        draft = drafts(requests, depth, generator)
        if decision.draft_len == 0:
            draft = DraftOutput.nothing(requests, CPU)
        alone = eager.plan(step, draft, decision)
        worker = worker_of(eager)
        executor = ExtraRowsExecutor(eager, worker.executors.select, rows_of_prompts(worker, 5))
        plan = executor.plan(step, draft, decision)
        own = len(alone.input_ids)
        assert plan.verify_lens.tolist() == alone.verify_lens.tolist() and plan.indptr.tolist() == alone.indptr.tolist()
        for name in ("requests", "columns", "input_ids", "positions"):
            assert getattr(plan, name)[:own].tolist() == getattr(alone, name).tolist()
        # To the step they are padding: of no request, and beyond every draft.
        assert plan.requests[own:].tolist() == [0] * ROWS and min(plan.columns[own:].tolist()) > 4
        assert plan.input_ids[own:].tolist() == list(range(1000, 1000 + ROWS))
        assert plan.positions[own:].tolist() == [
            context + i for length, context in zip(LENGTHS, CONTEXTS, strict=True) for i in range(length)
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "how"),
    [({}, {}), ({}, {"requests": 2, "choose": half_of}), ({}, {"requests": 2, "choose": one_of_two})],
    ids=["auto", "half_of", "one_of_two"],
)
def test_texts_next_to_prompts_have_the_targets_distribution(monkeypatch, options, how):
    """Prompts of other tokens in each run; what the target says of their rows is another number each time."""

    def run(loop, step, decision, hooks):
        worker = worker_of(loop.eager, columns=300)
        rows = rows_of_prompts(worker, GAMMA + 1, first_id=sum(map(len, loop.texts)))
        batch = SimpleNamespace(reqs=[request()] * len(step), seq_lens_cpu=step.prefix_lens)
        outcome = ExtraRowsExecutor(loop.eager, worker.executors.select, rows).run(
            replace(step, batch=batch), decision, hooks
        )
        assert rows.logits[:, 0].tolist() == [8, 9, 12]
        assert rows.states[:, 0].tolist() == list(range(ROWS))
        return outcome

    def verify(loop, step, plan):
        target = StageLoop.verify(loop, step, plan)
        logits = target.logits_output.next_token_logits
        numbers = torch.arange(float(ROWS))[:, None]
        whole = torch.cat([logits, numbers.expand(-1, logits.shape[1])])
        states = torch.cat([target.captured, numbers.expand(-1, target.captured.shape[1])])
        return target._replace(logits_output=SimpleNamespace(next_token_logits=whole), captured=states)

    monkeypatch.setattr(ToyLoop, "run", run, raising=False)
    monkeypatch.setattr(ToyLoop, "verify", verify, raising=False)
    length = 2 if not how else 1
    assert distribution_error(monkeypatch, options, length, **how) < 1e-9


@pytest.mark.parametrize("width", [1, 3, 8])
def test_blocks_are_the_prompts(width):
    lengths, contexts = [1, 8, 3, 17], [5, 0, 64, 2]
    blocks, depth = Blocks.of(lengths, contexts, width), width - 1
    found: list[tuple[int, int]] = []  # of each row: its prompt, its position
    for block, (owner, context, anchor) in enumerate(zip(blocks.owners, blocks.contexts, blocks.anchors, strict=True)):
        drafts, ranks = (part[block * depth :][:depth] for part in (blocks.drafts, blocks.ranks))
        num = ranks.count(1.0)
        assert ranks == [1.0] * num + [-1.0] * (depth - num)
        assert [anchor, *drafts] == [len(found) + min(column, num) for column in range(width)]
        found += [(owner, context + column) for column in range(num + 1)]
    expected = [
        (prompt, context + i)
        for prompt, (length, context) in enumerate(zip(lengths, contexts, strict=True))
        for i in range(length)
    ]
    assert found == expected
    assert blocks.num_rows == len(found)
    assert [found[last] for last in blocks.lasts] == [(0, 5), (1, 7), (2, 66), (3, 18)]
