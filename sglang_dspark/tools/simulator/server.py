"""A server made of measured times: steps from a measured table, prefills from a line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import NamedTuple, Self

import numpy as np
import torch
from dspark_kernels import DraftBlock

from sglang_dspark.config import DSparkConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.online_calibration import OnlineCalibration
from sglang_dspark.scheduling.policies import ExtraRows
from sglang_dspark.scheduling.schedule import Schedule, has_usable_time
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.scheduling.step_times import StepKind
from sglang_dspark.step.decision import PLAIN, StepDecision, StepRecord
from sglang_dspark.step.state import DraftOutput
from sglang_dspark.tools.simulator.workload import BlockSource, Chunk, Ints, Prompts, Request, Workload


@dataclass(frozen=True)
class Prefill:
    """A prefill takes ``batch_ms`` for its batch, and ``token_ms`` for each of its tokens.

    For each token before it, to which it attends, a token takes ``context_ms`` more.
    """

    batch_ms: float
    token_ms: float = 0.0
    context_ms: float = 0.0

    @classmethod
    def from_table(cls, table: SpsTable) -> Self:
        """Take it from the step times, without the context.

        A batch costs as much as the non-speculative step of one request, and a token what a verified token costs under
        the table's highest load, where rows are as many as they get.
        """
        plain, full = float(table.verify_ms[-1, 0, 0]), float(table.verify_ms[-1, -1, 0])
        tokens = table.requests[-1] * table.gamma
        return cls(float(table.verify_ms[0, 0, 0]), max(0.0, (full - plain) / tokens))

    def ms(self, tokens: int, attended: int = 0) -> float:
        """Return the milliseconds of one prefill batch, whose tokens attend to so many tokens together."""
        return self.batch_ms + tokens * self.token_ms + attended * self.context_ms


@dataclass(frozen=True)
class Costs:
    """The times of a server's work.

    Attributes:
        table: what steps really take.
        prefill: of prompts.
        noise: standard deviation of a step's time, in logarithms.
        believed: the step times that the scheduler has been told; None: ``table``. A planner that knows the truth picks
            the steps that a measured table flatters, and none of its errors.
    """

    table: SpsTable
    prefill: Prefill
    noise: float = 0.0
    believed: SpsTable | None = None

    def step_ms(
        self,
        decision: StepDecision,
        requests: int,
        num_tokens: int,
        context: float,
        longest: int,
        extra: ExtraRows | None = None,
    ) -> float:
        """Return the milliseconds of one decode step, without noise.

        A table without tiers is a CPU's, where the plugin's attention computes as many rows for every request as for
        the one that verifies most.

        Args:
            num_tokens: tokens in the verify forward, anchors included.
            context: mean context tokens per request.
            longest: drafts of the request that verifies most.
            extra: further rows of the forward; None if there are none.
        """
        extra = extra or ExtraRows(0, 0, 0.0)
        verified = self.table.times(requests + extra.requests)
        joined_context = extra.joined_context(requests, context)
        ms = float(verified.at(joined_context, (0, verified.room_for(num_tokens + extra.rows))))
        times = self.table.times(requests)
        if not self.table.tiers and len(times.contexts) > 1:
            # The part of a step that grows with the context, which is attention, grows with padded rows.
            rows = requests * (1 + longest), num_tokens
            padded, real = (times.slope_ms[1, 0, times.room_for(number)] for number in rows)
            ms += float(max(0.0, padded - real)) * context
        drafted = requests if decision.draft_requests is None else len(decision.draft_requests)
        drafting = self.table.times(drafted).at(context)[:, 0]
        return ms + float(drafting[decision.draft_len] - drafting[0])


Lanes = list[list[tuple[int, int, int]]]
"""[requests][steps] of drafts proposed, verified and accepted."""


class Round(NamedTuple):
    """One request in one decode step: drafts proposed, verified and accepted."""

    request: int
    drafted: int
    verified: int
    accepted: int


@dataclass(frozen=True)
class Figures:
    """One line of the result, in the units of a measured sweep.

    Attributes:
        output_tok_s: tokens of all users per second.
        user_tok_s: mean over the requests of tokens per second from sending to the last token.
        ttft_ms: mean time to first token.
        tpot_ms: mean over the requests of the time per output token after the first.
        accept_length: tokens committed per request and step, bonus included.
        verify_len: drafts verified per request and step.
        wasted: share of the verified drafts that were rejected.
        parked: share of the steps in which nothing was drafted.
        step_ms: median time of a decode step.
        gap_p50_ms, gap_p99_ms, gap_max_ms: time between tokens that reach a user in a row, those of one step together.
    """

    output_tok_s: float
    user_tok_s: float
    ttft_ms: float
    tpot_ms: float
    accept_length: float
    verify_len: float
    wasted: float
    parked: float
    step_ms: float
    gap_p50_ms: float
    gap_p99_ms: float
    gap_max_ms: float


@dataclass
class Outcome:
    """The outcome of a workload.

    Attributes:
        requests: served ones, in the order of their ends.
        step_ms: of every decode step.
        plain_steps: steps in which nothing was drafted.
        rounds: all requests in all decode steps.
        loaded_ms, loaded_tokens: until the last request was sent: how long that was, and tokens of decode steps.
    """

    requests: list[Request] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    plain_steps: int = 0
    rounds: list[Round] = field(default_factory=list)
    loaded_ms: float = 0.0
    loaded_tokens: int = 0

    @property
    def loaded_tok_s(self) -> float:
        """Return tokens of all users per second while all of them had requests."""
        return 1e3 * self.loaded_tokens / self.loaded_ms

    def figures(self) -> Figures:
        """Sum up. Needs at least one request that was served."""
        wall_ms = max(r.done_ms for r in self.requests) - min(r.sent_ms for r in self.requests)
        tpots = [ms for request in self.requests if (ms := request.tpot_ms) is not None]
        gaps = [gap for request in self.requests for gap in request.gaps_ms] or [0.0]
        rounds = max(len(self.rounds), 1)
        verified, accepted = (sum(getattr(one, name) for one in self.rounds) for name in ("verified", "accepted"))
        return Figures(
            output_tok_s=1e3 * sum(request.output_tokens for request in self.requests) / wall_ms,
            user_tok_s=fmean(request.user_tok_s for request in self.requests),
            ttft_ms=fmean(request.first_ms - request.sent_ms for request in self.requests),
            tpot_ms=fmean(tpots) if tpots else 0.0,
            accept_length=1 + accepted / rounds,
            verify_len=verified / rounds,
            wasted=1 - accepted / verified if verified else 0.0,
            parked=self.plain_steps / max(len(self.step_ms), 1),
            step_ms=median(self.step_ms) if self.step_ms else 0.0,
            gap_p50_ms=median(gaps),
            gap_p99_ms=float(np.quantile(gaps, 0.99)),
            gap_max_ms=max(gaps),
        )

    def lanes(self, requests: int, steps: int) -> Lanes:
        """Return the first steps of the first requests."""
        of_request: dict[int, list[tuple[int, int, int]]] = {}
        for one in self.rounds:
            if one.request < requests:
                of_request.setdefault(one.request, []).append(one[1:])
        return [of_request[request][:steps] for request in sorted(of_request)]


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
        prefilled: whether it was a prefill, during which nothing is drafted.
    """

    ms: float
    requests: list[Request]
    record: StepRecord | None = None
    accepted: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    chunk: Chunk = field(default_factory=Chunk)
    prefilled: bool = False


class SimulatedServer:
    """Decides as a server does, and asks the costs how long it took.

    What is simulated: the loop of SGLang's scheduler (prompts are read before the next decode step, or with it), its
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
        # The step before, as the schedule is to learn of its time.
        self._timed: tuple[StepKind, float] | None = None

    def serve(self, workload: Workload) -> Outcome:
        """Serve a workload from an empty queue to the last token. What the schedule learned is kept."""
        self._workloads += 1
        # All policies serve the same requests, whatever they drew before.
        return _Episode(self, workload, np.random.default_rng(self._seed)).run()

    def run(self, requests: Sequence[Request], chunk: Chunk | None, now_ms: float) -> Result:
        """Run the next batch at a moment: a chunk of prompts if there is one, and what may run with it."""
        if chunk is None:
            return self.decode(requests, now_ms)
        extra = self.prompts.verified(chunk, len(requests)) if self.prompts.mixed and requests else None
        if extra is None:
            return self.prefill(chunk, requests if self.prompts.mixed else ())
        result = replace(self.decode(requests, now_ms, extra), chunk=chunk)
        self.interrupt()
        return result

    def interrupt(self) -> None:
        """Forget the time of the last step: something else runs before the next one."""
        self._timed = None

    def decode(self, requests: Sequence[Request], now_ms: float = 0.0, extra: ExtraRows | None = None) -> Result:
        """Run one decode step at a moment.

        Args:
            extra: rows of prompts in its verification.
        """
        if self._timed is not None and self.schedule.times is not None:
            self.schedule.times.observe(*self._timed)
        bs, context = len(requests), sum(request.context for request in requests) / len(requests)
        ids = self._ids(requests)
        weights = [request.slo.weight(now_ms, request.known_tokens) for request in requests]
        decision = self.schedule.choose(ids, context, weights=weights, extra=extra)
        logits, whole = self.blocks.draw([request.index for request in requests], self._rng)
        draft = self._draft(decision, bs, logits)
        lens = decision.select(draft).verify_lens
        num_tokens = bs + int(lens.sum())
        ms = self.costs.step_ms(decision, bs, num_tokens, context, int(lens.max()), extra)
        ms *= float(np.exp(self.costs.noise * self._rng.standard_normal()))
        kind = StepKind(bs, num_tokens, decision.draft_len, context)
        self._timed = (kind, ms) if has_usable_time(decision, bs) else None
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
        pending: Result | None = None
        while True:
            result = self._run_batch()
            if pending is not None:
                self._deliver(pending)
            if result is None and not self._waiting:
                return self._outcome
            pending = result

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
