"""What the requests of a batch ask of their own verification. The front end has checked it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_dspark.speculation import KEY, NO_PRESET, RequestOptions
from sglang_dspark.step.limits import Limits
from sglang_dspark.step.state import Copies

_NOTHING = RequestOptions()


def request_options(req: Any) -> RequestOptions:
    """Return the options of a scheduler-side request, which are read once."""
    if not hasattr(req, "dspark_options"):
        text = (req.sampling_params.custom_params or {}).get(KEY)
        req.dspark_options = _NOTHING if text is None else msgspec.json.decode(text, type=RequestOptions)
    options: RequestOptions = req.dspark_options
    return options


@dataclass(frozen=True)
class BatchOptions:
    """What the requests of a batch ask for.

    Attributes:
        each: the options of every request.
        limits: on their verification; None if no request asks for any.
        traced: whether a request wants its rounds.
        presets: places of the requests with a preset.
        max_verify: most drafts that the server verifies per request and step.
    """

    each: tuple[RequestOptions, ...]
    limits: Limits | None
    traced: bool
    presets: tuple[int, ...]
    max_verify: int

    @classmethod
    def of(cls, reqs: Sequence[Any], max_verify: int) -> BatchOptions:
        """Read the options of a batch.

        Args:
            max_verify: most drafts that the server verifies per request and step.
        """
        each = tuple(map(request_options, reqs))
        most = tuple(options.verify_limit(max_verify) for options in each)
        bounds = tuple(options.confidence_threshold for options in each)
        limited = min(most) < max_verify or any(bounds)
        return cls(
            each=each,
            limits=Limits(most, (0,) * len(most), bounds if any(bounds) else None) if limited else None,
            traced=any(options.trace for options in each),
            presets=tuple(
                place
                for place, options in enumerate(each)
                if options.preset != NO_PRESET and options.copy_limit(max_verify) > 0
            ),
            max_verify=max_verify,
        )

    def limits_with(self, copies: Copies | None) -> Limits | None:
        """Return the limits when presets propose ``copies``."""
        if copies is None:
            return self.limits
        limits = self.limits or Limits((self.max_verify,) * len(self.each), copies.lens)
        most = tuple(copied or most for copied, most in zip(copies.lens, limits.most, strict=True))
        return Limits(most, copies.lens, limits.thresholds)
