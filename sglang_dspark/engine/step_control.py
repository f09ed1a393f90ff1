"""Decides the steps of a worker, ours or SGLang's own, by what requests ask for, and learns from what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Raw, Struct

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.draft_input import committed_lengths
from sglang_dspark.engine.part import Part, Weigher, part_of
from sglang_dspark.engine.sglang_types import Req, ScheduleBatch
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.scheduling.policies import Beside
from sglang_dspark.scheduling.schedule import Schedule
from sglang_dspark.speculation import CORE, KEY, Speculation
from sglang_dspark.step.decision import StepDecision
from sglang_dspark.step.limits import RequestLimits
from sglang_dspark.step.record import StepRecord

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=Struct)
_NOTHING = Speculation()


def kept_by_request(read: Callable[Concatenate[Req, P], T]) -> Callable[Concatenate[Req, P], T]:
    """Decorate a function of SGLang's request in a scheduler: it is called once, and the request keeps the result.

    What else it takes has to be the same for all requests.
    """
    name = f"dspark_{read.__module__}.{read.__qualname__}"

    @wraps(read)
    def kept(req: Req, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if name not in vars(req):
            vars(req)[name] = read(req, *args, **kwargs)
        return vars(req)[name]

    return kept


def asked_for(req: Req, name: str, kind: type[S]) -> S:
    """Return what a scheduler-side request asks of the core or a feature; the defaults if it asks for nothing."""
    text = (req.sampling_params.custom_params or {}).get(KEY)
    asked = None if text is None else msgspec.json.decode(text, type=dict[str, Raw]).get(name)
    return kind() if asked is None else msgspec.json.decode(asked, type=kind)


@fenced("options of requests", instead=lambda req: _NOTHING)
@kept_by_request
def request_options(req: Req) -> Speculation:
    """Return the options of a scheduler-side request."""
    return asked_for(req, CORE, Speculation)


@dataclass(frozen=True)
class BatchOptions:
    """The options of a batch's requests.

    Attributes:
        limits: on their verification; None if no request asks for any.
        traced: whether a request wants its rounds.
        ids: of the requests.
    """

    limits: RequestLimits | None
    traced: bool
    ids: list[str]

    @classmethod
    def of(
        cls, reqs: Sequence[Req], max_verify: int, speculates: Callable[[Req], bool] = lambda req: True
    ) -> BatchOptions:
        """Read the options of a batch.

        Args:
            max_verify: most drafts that the server verifies per request and step.
            speculates: whether anything can be drafted for a request.
        """
        each = tuple(map(request_options, reqs))
        most = tuple(
            options.verify_limit(max_verify) if speculates(req) else 0 for req, options in zip(reqs, each, strict=True)
        )
        bounds = tuple(options.confidence_threshold or 0.0 for options in each)
        limited = min(most) < max_verify or any(bounds)
        return cls(
            limits=RequestLimits(most, bounds if any(bounds) else None) if limited else None,
            traced=any(options.trace for options in each),
            ids=[req.rid for req in reqs],
        )


@dataclass(frozen=True)
class StepControl:
    """The schedule of a worker between SGLang's batches and their results.

    Attributes:
        on_gpu: whether host and device work side by side.
    """

    schedule: Schedule
    agreement: Agreement
    parts: Sequence[Part]
    on_gpu: bool

    @cached_property
    def weigher(self) -> Weigher | None:
        """Return the part that weighs requests; None if there is none."""
        return part_of(self.parts, Weigher)

    def choose(self, batch: ScheduleBatch, options: BatchOptions, beside: Beside | None = None) -> StepDecision:
        """Return how deep to draft and how much to verify, by what is known by now of the steps before.

        All ranks of the server get rank 0's decision.

        Args:
            beside: further rows of its verification.
        """
        # Grammars have made the host wait for the step before, and cost it time for each row.
        awaited = self.on_gpu and batch.has_grammar
        # Of the host: under overlap it does not know yet what the step under way commits.
        context = sum(committed_lengths(batch.reqs)) / len(batch.reqs)
        weights = None if self.weigher is None else self.weigher.weights(batch)
        decision = self.schedule.choose(
            options.ids, context, options.limits, weights, beside, traced=options.traced, awaited=awaited
        )
        return self.agreement.share(decision)

    def forget(self, *, new_drafter: bool) -> None:
        """Forget what was learned, and have features do so: see :meth:`Schedule.forget`."""
        self.schedule.forget(new_drafter=new_drafter)
        for part in self.parts:
            part.weights_changed()

    def observe(
        self, reqs: Sequence[Req], record: StepRecord, committed: list[int], times_ms: tuple[float, float] | None
    ) -> None:
        """Learn from a step whose result has reached the host.

        Args:
            reqs: SGLang's requests of the step, which are about to take its tokens.
            record: of the step.
            committed: tokens committed per request, bonus included.
            times_ms: what the step took the device, and how long the host has waited for it; None if it is not known.
        """
        # Under overlap a request that has just ended takes part in one more step, whose tokens are dropped.
        running = [index for index, req in enumerate(reqs) if not (req.finished() or req.is_retracted)]
        accepted = [committed[index] - 1 for index in running]
        self._learn_time(times_ms)
        if running:
            self._learn(record, running, accepted)
        for part in self.parts:
            part.step_done(reqs, record, running, accepted)

    @fenced("lessons of step times", instead=nothing)
    def _learn_time(self, times_ms: tuple[float, float] | None) -> None:
        if times_ms is not None:
            self.schedule.processed(*times_ms)

    @fenced("lessons of outcomes", instead=nothing)
    def _learn(self, record: StepRecord, running: list[int], accepted: list[int]) -> None:
        self.schedule.observe(record, running, accepted)
