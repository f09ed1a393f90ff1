"""What requests ask for in the field ``speculation``, and how SGLang carries it and the counts of their drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import msgspec
import torch
from msgspec import Meta, Raw, Struct

from sglang_dspark.declared import int_range, truncate, validate
from sglang_dspark.engine.sglang_types import Req
from sglang_dspark.errors import best_effort
from sglang_dspark.step.state import RequestLimits

KEY = "dspark"
"""Of ``custom_params``, which SGLang carries to the scheduler: JSON text with what a request asks for, by feature."""
CORE_KEYS = "core"
"""The name under which :class:`Speculation` travels next to the features'."""
MOST_DRAFTS = 65535
"""Largest number of drafts that a request may name."""

Probability = Annotated[float, Meta(ge=0, le=1, description="must be a number from 0 to 1")]


class Speculation(Struct, frozen=True, omit_defaults=True):
    """Keys of the field that no feature has declared. The scheduler reads them as they are; defaults ask for nothing.

    Attributes:
        enabled: whether drafts are verified for the request at all.
        max_verify: most drafts verified for it per step; None leaves it to the server.
        confidence_threshold: verify the drafts before the first one whose raw confidence is below this; None verifies
            whatever the policy says.
        trace: return the decode rounds in ``meta_info["dspark_trace"]``, one entry per output token: the round at the
            first token that it committed, null elsewhere.
    """

    enabled: bool = True
    max_verify: Annotated[int, int_range(0, MOST_DRAFTS)] | None = None
    confidence_threshold: Probability | None = None
    trace: bool = False

    def verify_limit(self, max_verify: int) -> int:
        """Return the most drafts verified per step on a server that verifies up to ``max_verify``."""
        if not self.enabled:
            return 0
        return max_verify if self.max_verify is None else min(self.max_verify, max_verify)


def checked_keys(value: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that a decoded JSON value gives, each in its type.

    Args:
        types: of all keys, see :func:`~sglang_dspark.declared.field_types`.

    Raises:
        ValueError: not an object, an unknown key, or a bad value; names ``speculation``, the key and the remedy.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"speculation must be an object, not {truncate(value)}")
    given = {}
    for key, entry in value.items():
        if key not in types:
            known = ", ".join(sorted(types))
            raise ValueError(f"speculation.{truncate(key)[1:-1]} is not a known option; known are {known}")
        try:
            given[key] = validate(entry, types[key])
        except ValueError as error:
            raise ValueError(f"speculation.{key} {error}, not {truncate(entry)}") from None
    return given


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


@best_effort("options of requests", instead=lambda req: _NOTHING)
@kept_by_request
def request_options(req: Req) -> Speculation:
    """Return the options of a scheduler-side request."""
    return asked_for(req, CORE_KEYS, Speculation)


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


def carry_counts(result: Any, verified: torch.Tensor, drafted: Sequence[int]) -> None:
    """Put on a result of SGLang's how many drafts were verified and drawn, for each request.

    ``cap_lens`` are SGLang's rows verified, which its log, its metrics and every answer show. ``block_accept_lens``, of
    another algorithm, carry drafts drawn: SGLang adds them up for a request, and its answer comes to the front end with
    the sum.
    """
    result.cap_lens, result.block_accept_lens = verified + 1, torch.tensor(drafted)
