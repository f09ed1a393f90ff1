"""Run the parts of a step on requests that do not exist, to take their times."""

from dataclasses import replace

from dspark_kernels import DraftBlock, SamplingBatch

from sglang_dspark.engine.batch import read_decode_batch
from sglang_dspark.engine.measure_steps import DummyBatch
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.selection import FixedLength, TopK
from sglang_dspark.step.state import DraftOutput
from sglang_dspark.worker.executors.graphs import ExecutorSelector


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

    def verify(self, drafts: int) -> None:
        """Plan, verify, accept and commit so many drafts per request."""
        step, decision = self._step, StepDecision(drafts, FixedLength())
        draft = DraftOutput(DraftBlock(self._tokens[drafts]), None, [drafts] * len(step))
        executor = self._executors.select(step, decision)
        executor.stage(step, decision)
        if not executor.in_graphs:
            step = replace(step, batch=self._dummy.fresh())
        executor.finish(step, decision, executor.take(draft))
