"""Read the options that requests have for their own verification. The front end has checked them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
from msgspec import Raw, Struct

from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.fence import fenced
from sglang_dspark.speculation import CORE, KEY, Speculation
from sglang_dspark.step.state import RequestLimits

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

    def within(self, room: int) -> BatchOptions:
        """Return the options of a step with slots for so many drafts of each request."""
        limits = self.limits or RequestLimits((room,) * len(self.ids))
        return replace(self, limits=replace(limits, max_verify=tuple(min(most, room) for most in limits.max_verify)))
