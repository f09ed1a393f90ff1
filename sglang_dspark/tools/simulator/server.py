"""A server made of measured times: SGLang's loop around the schedule of a real one, in simulated time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from dspark_kernels import DraftBlock

from sglang_dspark.calibration.online import OnlineCalibration
from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.policies import Beside
from sglang_dspark.scheduling.schedule import Schedule, is_of_a_kind
from sglang_dspark.scheduling.step_times import StepKind
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.record import StepRecord
from sglang_dspark.step.state import DraftOutput
from sglang_dspark.tools.simulator.blocks import BlockSource, Ints
from sglang_dspark.tools.simulator.costs import Costs
from sglang_dspark.tools.simulator.outcome import Outcome, Round
from sglang_dspark.tools.simulator.prompts import Chunk, Prompts
from sglang_dspark.tools.simulator.workload import Request, Workload

_CPU = torch.device("cpu")


@dataclass
class Result:
    """A batch that ran.

    Attributes:
        ms: how long it took.
        requests: ran in it, and have got tokens.
        record: of them; None of a prefill without any.
        accepted: drafts of each.
        chunk: prompts that were read.
        prefilled: whether it was a prefill, beside which nothing is drafted.
    """

    ms: float
    requests: list[Request]
    record: StepRecord | None = None
    accepted: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    chunk: Chunk = field(default_factory=Chunk)
    prefilled: bool = False


class SimulatedServer:
    """Decides as a server does, and asks the costs how long it took.

    What is simulated: the loop of SGLang's scheduler (prompts are read before the next decode step, or beside it), its
    overlap (the result of a batch is looked at after the next one has run, so that a request that ended takes part in
    one more step), and the schedule of the plugin itself, with its statistics, its calibration and its probes.

    Args:
        costs: how long things take, and what the schedule is told of it. It has to find out about the rest.
        blocks: where drafts come from.
        options: the policy, and what is said about prompts.
        uniform: whether whole blocks are computed, whatever a step verifies of them.
        mixed_chunk: whether requests get tokens while prompts are read.
        seed: of everything random.
    """

    def __init__(
        self,
        costs: Costs,
        blocks: BlockSource,
        options: DSparkConfig,
        *,
        uniform: bool = False,
        mixed_chunk: bool = False,
        seed: int = 0,
    ) -> None:
        gamma = costs.table.gamma
        if blocks.gamma < gamma:
            raise ConfigError(
                f"blocks have {blocks.gamma} drafts and the SPS table is for {gamma}; give blocks of the same drafter"
            )
        self.costs, self.blocks = costs, blocks
        self._seed, self._rng = seed, np.random.default_rng(seed)
        has_head = blocks.draw([0], np.random.default_rng(0))[0] is not None
        calibration = OnlineCalibration(gamma) if has_head else None
        self.schedule = Schedule(options, gamma, calibration, _CPU)
        whole_blocks = bool(costs.table.tiers) or uniform
        self.schedule.start(costs.believed or costs.table, fixed_draft_shape=whole_blocks, uniform=uniform)
        self.prompts = Prompts(costs.table, options, mixed=mixed_chunk)
        self._workloads = 0
        # The step behind, as the schedule is to learn of its time.
        self._timed: tuple[StepKind, float] | None = None

    def serve(self, workload: Workload) -> Outcome:
        """Serve a workload from an empty queue to the last token. What the schedule learned is kept."""
        self._workloads += 1
        # All policies serve the same requests, whatever they drew before.
        return _Episode(self, workload, np.random.default_rng(self._seed)).run()

    def run(self, requests: Sequence[Request], chunk: Chunk | None, now_ms: float) -> Result:
        """Run the next batch at a moment: a chunk of prompts if there is one, and what may run beside it."""
        if chunk is None:
            return self.decode(requests, now_ms)
        beside = self.prompts.verified(chunk, len(requests)) if self.prompts.mixed and requests else None
        if beside is None:
            return self.prefill(chunk, requests if self.prompts.mixed else ())
        result = replace(self.decode(requests, now_ms, beside), chunk=chunk)
        self.interrupt()
        return result

    def interrupt(self) -> None:
        """Forget the time of the step behind: something else runs before the next one."""
        self._timed = None

    def decode(self, requests: Sequence[Request], now_ms: float = 0.0, beside: Beside | None = None) -> Result:
        """Run one decode step at a moment.

        Args:
            beside: rows of prompts in its verification.
        """
        if self._timed is not None and self.schedule.times is not None:
            self.schedule.times.observe(*self._timed)
        bs, context = len(requests), sum(request.context for request in requests) / len(requests)
        ids = self._ids(requests)
        weights = [request.slo.weight(now_ms, request.known_tokens) for request in requests]
        decision = self.schedule.choose(ids, context, weights=weights, beside=beside)
        logits, whole = self.blocks.draw([request.index for request in requests], self._rng)
        draft = self._draft(decision, bs, logits)
        lens = decision.select(draft).verify_lens
        num_tokens = bs + int(lens.sum())
        ms = self.costs.step_ms(decision, bs, num_tokens, context, int(lens.max()), beside)
        ms *= float(np.exp(self.costs.noise * self._rng.standard_normal()))
        kind = StepKind(bs, num_tokens, decision.draft_len, context)
        self._timed = (kind, ms) if is_of_a_kind(decision, bs) else None
        record = StepRecord(ids, decision, draft.draft_lens, lens, draft.confidence, None)
        return Result(ms, list(requests), record, np.minimum(whole, lens.numpy()))

    def prefill(self, chunk: Chunk, requests: Sequence[Request] = ()) -> Result:
        """Read prompts, and give each request a token; without requests, short prompts are verified."""
        self.interrupt()
        none = [0] * len(requests)
        record = StepRecord(self._ids(requests), PLAIN, none, torch.tensor(none), None, None) if requests else None
        laid_out = None if requests else self.prompts.verified(chunk)
        if laid_out is None:
            ms = self.costs.prefill.ms(chunk.tokens + len(requests), chunk.attended)
        else:
            ms = self.costs.step_ms(PLAIN, laid_out.requests, laid_out.rows, laid_out.context, 0)
        return Result(ms, list(requests), record, np.array(none), chunk, prefilled=True)

    def _ids(self, requests: Sequence[Request]) -> list[str]:
        """Return names of requests: every workload counts its own from 0."""
        return [f"{self._workloads}.{request.index}" for request in requests]

    def _draft(self, decision: StepDecision, bs: int, logits: np.ndarray | None) -> DraftOutput:
        """Return the drafts that the draft stage proposes."""
        depth = decision.draft_len
        head = None if logits is None else torch.from_numpy(logits[:, :depth]).float()
        block = DraftBlock(torch.zeros((bs, depth), dtype=torch.int64), head)
        confidence = None
        if depth > 0 and decision.with_confidence:
            confidence = self.schedule.forecast.predict(head, bs, depth)
        return DraftOutput(block, confidence, decision.draft_lens(bs))


class _Episode:
    """One workload on its way through a server."""

    def __init__(self, server: SimulatedServer, workload: Workload, rng: np.random.Generator) -> None:
        self._server = server
        self._now_ms = 0.0
        self._workload, self._to_send, self._unserved = workload, workload.requests(rng), workload.num_requests
        self._long_prompts = workload.long_requests(rng.spawn(1)[0])  # the others' are the same without
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._outcome = Outcome()
        for user in range(workload.users + (workload.long_prompt is not None)):
            self._send_next(user)

    def run(self) -> Outcome:
        behind: Result | None = None
        while True:
            result = self._run_batch()
            if behind is not None:
                self._deliver(behind)
            if result is None and not self._waiting:
                return self._outcome
            behind = result

    def _run_batch(self) -> Result | None:
        chunk = self._server.prompts.next_chunk(self._waiting, len(self._running))
        if chunk is None and not self._running:
            return None
        result = self._server.run(self._running, chunk, self._now_ms)
        if not result.prefilled:
            assert result.record is not None, "a decode step has a record"
            self._outcome.step_ms.append(result.ms)
            self._outcome.plain_steps += result.record.decision.draft_len == 0
        self._running += result.chunk.read
        self._now_ms += result.ms
        return result

    def _deliver(self, result: Result) -> None:
        """Look at a result: tokens reach their users, and users whose answer is complete go on."""
        record, limit = result.record, self._server.prompts.limit
        if limit is not None and result.chunk.pieces and result.requests:
            drafted = record is not None and record.decision.draft_len > 0
            limit.learn(result.chunk.tokens + len(result.requests), result.ms, drafted=drafted)
        if record is not None:
            running = [place for place, request in enumerate(result.requests) if not request.done]
            accepted, verified = result.accepted[running].tolist(), record.verify_lens.tolist()
            self._server.schedule.observe(record, running, accepted)
            for place, count in zip(running, accepted, strict=True):
                request = result.requests[place]
                request.tell(self._now_ms, count + 1)
                self._outcome.rounds.append(Round(request.index, record.drafted[place], verified[place], count))
        for request in result.chunk.read:
            request.tell(self._now_ms, 1)
        for request in [request for request in self._running if request.done]:
            request.done_ms = self._now_ms
            self._running.remove(request)
            self._outcome.requests.append(request)
            self._unserved -= request.user < self._workload.users
            self._send_next(request.user)

    def _send_next(self, user: int) -> None:
        """Let a user send the next request, if there is one left."""
        if user < self._workload.users:
            request = next(self._to_send, None)
        else:
            request = next(self._long_prompts) if self._unserved else None
        if request is not None:
            request.user, request.slo = user, self._workload.slo(user)
            request.sent_ms = self._now_ms
            self._waiting.append(request)
        elif not self._outcome.loaded_ms:
            self._outcome.loaded_ms = self._now_ms
            self._outcome.loaded_tokens = sum(one.accepted + 1 for one in self._outcome.rounds)
