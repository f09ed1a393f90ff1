"""Prepares a worker to serve: compiles kernels in every form that a step can need, and runs the steps that are timed.

Triton compiles a kernel again for other constants, for an argument that is None, and by some properties of numbers and
addresses. What of that depends on a step: its requests, drafts per request, sampling, and the source of the drafts. The
stages run here eagerly, once for every such difference, on requests that do not exist. CUDA graphs replay the same
kernels, and steps that fit into no graph need them all.
"""

import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from dspark_kernels import (
    DraftBlock,
    SamplingBatch,
    StepRequests,
    VerifyRows,
    is_crowded,
    num_processors,
    num_splits,
    plan_staged,
    plan_top,
    plan_uniform,
    prepare,
)
from triton.runtime.jit import KernelInterface

from sglang_dspark.engine.batch import read_decode_batch
from sglang_dspark.engine.graphs import Captured
from sglang_dspark.engine.measure_steps import DummyBatch, most_running
from sglang_dspark.engine.part import LogitsPart
from sglang_dspark.engine.target import kv_heads_of_layers
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import geometric_grid
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import DecodeBatch, DraftOutput, TargetOutput, VerifyPlan
from sglang_dspark.worker.drafter import Drafter, NoDrafter
from sglang_dspark.worker.eager import EagerExecutor
from sglang_dspark.worker.graphs import ExecutorSelector
from sglang_dspark.worker.kernel_comparison import Results, tensors_of
from sglang_dspark.worker.self_check import SelfCheck

logger = logging.getLogger(__name__)

_CONTEXT = 16  # tokens per request; no kernel is compiled for a length
_MAX_REQUESTS = 256  # of whole steps: more differ only in their plans
_MAX_SAMPLED_DRAFTS = 512  # the scores of so many, in float32, are 0.3 GB with 152k tokens

# Temperature, top-k, top-p, min-p and seed, as SGLang's requests have them.
_Parameters = tuple[float, int, float, float, int | None]
_GREEDY: _Parameters = (0.0, -1, 1.0, 0.0, None)
_SAMPLED: _Parameters = (1.0, -1, 1.0, 0.0, None)
_SEEDED: _Parameters = (1.0, -1, 1.0, 0.0, 7)
_FILTERED: _Parameters = (1.0, 20, 0.9, 0.05, None)
_SEEDED_FILTERED: _Parameters = (1.0, 20, 0.9, 0.05, 7)

# What the requests of a batch ask for, in turn: the mixtures that drafting tells apart, and those that acceptance does.
_Mix = tuple[_Parameters, ...]
_DRAFT_MIXES: tuple[_Mix, ...] = ((_GREEDY,), (_SAMPLED,), (_SEEDED,), (_SEEDED, _SAMPLED))
_MIXES: tuple[_Mix, ...] = (*_DRAFT_MIXES, (_FILTERED,), (_SEEDED_FILTERED,), (_SEEDED, _FILTERED))


def warm_up(
    executor: EagerExecutor,
    target_worker: Any,
    max_verify: int,
    request_slots: Sequence[int],
    parts: Sequence[LogitsPart] = (),
    check: SelfCheck | None = None,
) -> None:
    """Compile what the steps of a server need, or load it from Triton's cache; takes seconds then.

    Args:
        max_verify: most drafts that a step verifies per request.
        request_slots: batch sizes that are captured as CUDA graphs, none where these are off.
        check: compares each form of a kernel with its reference; None compares nothing.

    Raises:
        EngineError: a kernel and its reference differ.
    """
    began = time.monotonic()
    runner = target_worker.model_runner
    most = most_running(runner)
    window, context = max_verify + 1, _context(runner, max_verify)

    def dummy(requests: int) -> DummyBatch:
        return DummyBatch(target_worker, requests, context, window)

    with torch.no_grad(), nullcontext() if check is None else check.looking_on():
        req_to_token = runner.req_to_token_pool.req_to_token
        # Kernels round numbers of requests up to powers of two.
        captured = geometric_grid(max(request_slots, default=0))
        _lay_out(executor.drafter, req_to_token, max_verify, geometric_grid(most), on_device=False)
        _lay_out(executor.drafter, req_to_token, max_verify, captured, on_device=True)
        of_whole_steps = geometric_grid(min(most, _MAX_REQUESTS))
        for requests in of_whole_steps:
            # Dummy requests get K/V from position 1 on: of zeros, every kind of attention would give zeros.
            for length in () if check is None else range(1, context, window):
                with DummyBatch(target_worker, requests, length, window) as batch:
                    _WarmUpSteps(executor, batch, max_verify).fill_context()
            with dummy(requests) as batch:
                _WarmUpSteps(executor, batch, max_verify).run()
        processors, kv_heads = num_processors(req_to_token.device), kv_heads_of_layers(runner.model)
        of_verification = {num for heads in kv_heads for num in of_every_attention(most, heads, processors)}
        for depth in range(1, window):
            for requests in sorted(of_verification):
                with dummy(requests) as batch:
                    _WarmUpSteps(executor, batch, max_verify).verify(depth)
        with dummy(min(2, most)) as batch:
            _WarmUpSteps(executor, batch, max_verify).accept(parts)
    # Graphs allocate from a pool of their own, which cannot use what lies cached here.
    torch.cuda.empty_cache()
    logger.info("DSPARK: compiled or loaded every kernel in %.1f s", time.monotonic() - began)


def _context(runner: Any, max_verify: int) -> int:
    """Return the committed tokens of a dummy request."""
    room = min(runner.model_config.context_len, runner.token_to_kv_pool.size) - max_verify - 1
    return max(1, min(_CONTEXT, room))


@contextmanager
def on_stream_of_steps(runner: Any, *, overlap: bool) -> Iterator[None]:
    """Queue what is launched inside where steps will queue theirs.

    torch's allocator keeps what is given back for the stream that had it. Without overlap SGLang makes that stream when
    it begins to serve; what was held elsewhere then comes back to it, after a wait, when memory runs out.
    """
    device = torch.get_device_module(runner.device)
    device.synchronize()
    with device.stream(runner.forward_stream if overlap else None):
        yield
    device.synchronize()


def hold_largest_step(
    executor: EagerExecutor, target_worker: Any, max_verify: int, parts: Sequence[LogitsPart] = ()
) -> None:
    """Have torch's allocator hold what the largest step takes outside of CUDA graphs, so that no request finds it gone.

    All requests that may run are sampled and have drafts of their own, and none fits into a graph.

    Raises:
        ConfigError: the memory is not there.
    """
    runner = target_worker.model_runner
    most = most_running(runner)
    try:
        with ExitStack() as held, torch.no_grad(), DummyBatch(target_worker, most, 1, max_verify + 1) as batch:
            for part in parts:
                held.enter_context(part.held(most))
            _WarmUpSteps(executor, batch, max_verify).fill()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of --max-running-requests={most} sampled requests with {max_verify} drafts each does not fit into "
            "the memory that weights, K/V pool and CUDA graphs leave free; lower --max-running-requests or "
            f"--mem-fraction-static ({error})"
        ) from error


def check_graphs(executors: ExecutorSelector, target_worker: Any, max_verify: int, check: SelfCheck) -> None:
    """Replay graphs of the smallest and the largest batch, and compare them with what they were captured from.

    Raises:
        EngineError: a graph gives something else.
    """
    captured = executors.captured
    # Ranks would have to agree on each comparison before the next one.
    if captured is None or captured.eager.agreement.needed:
        return
    runner = target_worker.model_runner
    eps, context = torch.finfo(runner.dtype).eps, _context(runner, max_verify)

    def both(drafts: int, requests: int, attempt: int) -> Results:
        length = max(1, context - attempt)
        with torch.no_grad(), DummyBatch(target_worker, requests, length, max_verify + 1) as dummy:
            graphs = MeasuredSteps(executors, dummy, max_verify).graphs(drafts)
            replayed = [tensor.clone() for graph in graphs for tensor in _compared(graph.replay())]
            with check.looking_on():  # the forms of captured steps
                launched = [tensor for graph in graphs for tensor in _compared(graph.launched())]
        return Results(replayed, launched, eps, requests)

    for drafts in sorted({0, max_verify}):
        most = (captured.tiers.tokens if drafts else captured.tiers.requests)[-1]
        sizes = [size for size in captured.tiers.requests if size * (1 + drafts) <= most]
        for requests in sorted({*sizes[:1], *sizes[-1:]}):
            check.check_graph(partial(both, drafts, requests))


def _compared(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a graph returns; of a forward not the pools of states that only commits read."""
    yield from tensors_of(output._replace(advance=None) if isinstance(output, TargetOutput) else output)


def log_rows_against_steps(executor: EagerExecutor, target_worker: Any, max_verify: int) -> None:
    """Log by how much logits of rows that are verified together differ from those of single steps."""
    runner = target_worker.model_runner
    context, tokens, found = _context(runner, max_verify), None, []
    with torch.no_grad():
        for first, rows in [(0, max_verify + 1), *((row, 1) for row in range(max_verify + 1))]:
            with DummyBatch(target_worker, 1, context + first, rows) as dummy:
                tokens = dummy.tokens(rows) if tokens is None else tokens
                found.append(_WarmUpSteps(executor, dummy, rows - 1).logits(tokens[:, first : first + rows]))
    together, alone = found[0], torch.cat(found[1:])
    logger.info(
        "DSPARK: logits of %d rows that are verified together differ from those of single steps by at most %.3g; the "
        "largest logit is %.3g",
        *(len(alone), (together - alone).abs().max().item(), alone.abs().max().item()),
    )


def report_late_kernels() -> None:
    """Log every form of a kernel of ours that Triton compiles, or loads from its cache, from now on."""
    triton.knobs.runtime.kernel_load_end_hook.add(_loaded)  # a second time is none


def _loaded(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
    """Triton calls this once for every form of a kernel, with the name of its function."""
    if name in _own_kernels():
        logger.warning(
            "DSPARK: the kernel %s was compiled or loaded after start-up, and a step has waited for it (%s); please "
            "report this, with the flags of the server and the options of the request",
            name,
            hash[:12],
        )


def _own_kernels() -> set[str]:
    modules = [module for name, module in sys.modules.items() if name.startswith("dspark_kernels.")]
    values = [value for module in modules for value in vars(module).values()]
    return {value.__name__ for value in values if isinstance(value, KernelInterface)}


def of_every_attention(most: int, kv_heads: int, processors: int) -> list[int]:
    """Return numbers of requests up to ``most`` whose attention takes every kernel that those of others take.

    Contexts of few requests are split over several programs, and programs of many requests are small ones.

    Args:
        kv_heads: of a target layer on this rank.
        processors: multiprocessors of the GPU.
    """
    first: dict[tuple[bool, bool], int] = {}
    for num in range(1, most + 1):
        batch = num, kv_heads, processors
        first.setdefault((num_splits(*batch) > 1, is_crowded(*batch)), num)
    return sorted(first.values())


def widths(most: int) -> list[int]:
    """Return the drafts per request up to ``most`` that acceptance tells apart, as it rounds up to powers of two."""
    return sorted({min(2**power - 1, most) for power in range(1, (most + 1).bit_length() + 1)} - {0})


def _lay_out(
    drafter: Drafter | NoDrafter, req_to_token: torch.Tensor, most: int, requests: Iterable[int], *, on_device: bool
) -> None:
    """Stage and plan for so many requests, of more of them and more drafts than a whole step here has.

    Args:
        most: drafts that a step verifies per request.
        on_device: the device knows the number of requests, as in CUDA graphs, and not the host.
    """
    device = req_to_token.device
    for num in requests:
        ids = torch.arange(num, dtype=torch.int64, device=device)
        rows = ids % len(req_to_token)
        given = StepRequests(ids, ids % 2, rows, req_to_token, ids[-1:] + 1 if on_device else None)
        plan_uniform(0, ids[:, None][:, :0], given, num)
        for depth in geometric_grid(most):
            drafts = ids[:, None] + torch.arange(depth, device=device)
            survival = (1 / (2 + drafts)).cumprod(1)
            plan_uniform(depth, drafts, given, num * (depth + 1))
            plan_top(survival, num * depth // 2, drafts, given, num * (depth + 1))
        if on_device and most:
            out = VerifyRows.empty(num, num * (most + 1), device)
            plan_staged(survival, survival.new_ones(num), ids.new_tensor([num * most // 2, -1, -1]), drafts, given, out)
        if not on_device:
            prepare(given, drafter.num_slots, drafter.mask_token_id)


class _WarmUpSteps:
    """Decode steps of a dummy batch, run with the server's own eager executor."""

    def __init__(self, executor: EagerExecutor, dummy: DummyBatch, max_verify: int) -> None:
        self._executor, self._dummy, self._most = executor, dummy, max_verify
        self._requests = len(dummy.fresh().seq_lens)

    def run(self) -> None:
        """Run a non-speculative step, and one with drafts of which not all are verified."""
        self._step(PLAIN, _DRAFT_MIXES)
        if self._most > 0:
            depth = max(1, min(self._most, _MAX_SAMPLED_DRAFTS // self._requests))
            self._step(StepDecision(depth, TopK(max(1, self._requests * depth // 2))), _DRAFT_MIXES)

    def accept(self, parts: Sequence[LogitsPart]) -> None:
        """Verify every mix, windows of every width; and run what else there is."""
        plan, target = self._step(PLAIN, _MIXES)
        self._executor.drafter.inject(plan.input_ids, target.captured, plan.positions, plan.slots)
        for part in parts:
            part.warm_up(plan, target.logits_output.next_token_logits)
        for width in widths(self._most):
            self._step(StepDecision(width, FixedLength()), _MIXES)

    def fill(self) -> None:
        """Run the largest step: sampled, with as many drafts as may be verified."""
        self._step(StepDecision(self._most, FixedLength()) if self._most else PLAIN, ((_SAMPLED,),))

    def fill_context(self) -> None:
        """Verify as much as a step may, and write the draft K/V of all rows."""
        plan, target = self._step(StepDecision(self._most, FixedLength()) if self._most else PLAIN, ((_GREEDY,),))
        self._executor.drafter.inject(plan.input_ids, target.captured, plan.positions, plan.slots)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the target's logits [rows, V] float32 of the window ``tokens`` [1, rows] of one request."""
        executor, step = self._executor, replace(self._batch((_GREEDY,)), anchors=tokens[:, 0].clone())
        depth = tokens.shape[1] - 1
        decision = StepDecision(depth, FixedLength()) if depth else PLAIN
        draft = DraftOutput(DraftBlock(tokens[:, 1:].clone()), None, [depth])
        plan = executor.plan(step, draft, decision)
        target = executor.verify(step, plan)
        logits: torch.Tensor = target.logits_output.next_token_logits.float().clone()
        if not depth and target.advance is not None:
            target.advance(torch.ones_like(step.prefix_lens))
        return logits

    def verify(self, depth: int) -> None:
        """Verify made-up drafts. Attention has kernels for a width, and for few requests and many."""
        step = self._batch((_GREEDY,))
        draft = DraftOutput(DraftBlock(step.anchors[:, None].repeat(1, depth)), None, [depth] * len(step))
        self._executor.finish(step, StepDecision(depth, FixedLength()), draft)

    def _step(self, decision: StepDecision, mixes: Sequence[_Mix]) -> tuple[VerifyPlan, TargetOutput]:
        """Draft and accept with each of ``mixes``; plan and verify once: the target knows nothing of them."""
        executor, step = self._executor, self._batch(mixes[0])
        draft = executor.draft(step, decision)
        plan = executor.plan(step, draft, decision)
        target = executor.verify(step, plan)
        accepted = executor.accept(step, draft, plan, target)
        for mix in mixes[1:]:
            step = self._batch(mix)
            draft = executor.draft(step, decision)
            accepted = executor.accept(step, draft, plan, target)
        executor.commit(plan, accepted, target)
        executor.drafter.committed(plan)
        executor.drafter.settle()
        return plan, target

    def _batch(self, mix: _Mix) -> DecodeBatch:
        rows_of = partial(self._rows, mix)
        return read_decode_batch(self._dummy.fresh(), rows_of(range(self._requests)), rows_of=rows_of, seed=0, step=0)

    def _rows(self, mix: _Mix, requests: Sequence[int]) -> SamplingBatch:
        temperatures, top_ks, top_ps, min_ps, seeds = zip(*(mix[r % len(mix)] for r in requests), strict=True)
        return SamplingBatch.from_lists(temperatures, top_ks, top_ps, min_ps, seeds, device=self._dummy.device)


class MeasuredSteps:
    """Decode steps on a dummy batch of greedy requests, in the two parts that a table has times of."""

    def __init__(self, executors: ExecutorSelector, dummy: DummyBatch, max_verify: int) -> None:
        self._executors, self._dummy = executors, dummy
        batch = dummy.fresh()
        bs, device = len(batch.seq_lens), batch.seq_lens.device
        rows = SamplingBatch.from_lists([0.0] * bs, [-1] * bs, [1.0] * bs, [0.0] * bs, [None] * bs, device)
        # Graphs need no batch of SGLang's: making one would count as time of the step.
        self._step = replace(read_decode_batch(batch, rows, seed=0, step=0), batch=None)
        tokens = dummy.tokens(max_verify + 1)
        # Contiguous: ranks adopt each other's drafts in place.
        self._tokens = [tokens[:, 1 : depth + 1].contiguous() for depth in range(max_verify + 1)]

    def draft(self, depth: int) -> None:
        """Draft blocks of so many drafts, in a graph where a step of so many requests is served from one."""
        # A budget of 0: with all drafts verified, a step may be too large for the graphs that other budgets fit into.
        decision = StepDecision(depth, TopK(0))
        executor = self._executors.select(self._step, decision)
        executor.stage(self._step, decision)
        executor.draft(self._step, decision)

    def graphs(self, drafts: int) -> list[Captured[Any]]:
        """Stage a step that verifies so many drafts per request, and return the graphs that it replays."""
        step, decision, captured = self._step, StepDecision(drafts, FixedLength()), self._executors.captured
        tier = None if captured is None else captured.tier(step, decision)
        if captured is None or tier is None:
            return []
        self.draft(drafts)
        self.verify(drafts)
        found: list[Captured[Any]] = [captured.forwards[tier]]
        # A second commit would have the states of recurrent layers advance twice.
        if tier in captured.fused and captured.forwards[tier].output.advance is None:
            found.append(captured.fused[tier])
        if drafts and (slots := captured.draft_slots(step)) is not None:
            found.insert(0, captured.drafts[slots, False])
        return found

    def verify(self, drafts: int) -> None:
        """Plan, verify, accept and commit so many drafts per request."""
        step, decision = self._step, StepDecision(drafts, FixedLength())
        draft = DraftOutput(DraftBlock(self._tokens[drafts]), None, [drafts] * len(step))
        executor = self._executors.select(step, decision)
        executor.stage(step, decision)
        if not executor.in_graphs:
            step = replace(step, batch=self._dummy.fresh())
        executor.finish(step, decision, executor.use_external_draft(draft))
