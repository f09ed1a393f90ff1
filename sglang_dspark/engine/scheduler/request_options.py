"""Read the options that requests have for their own verification. The front end has checked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang_dspark.speculation import KEY, NO_PRESET, RequestOptions
from sglang_dspark.step.limits import RequestLimits

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
    """The options of a batch's requests.

    Attributes:
        each: the options of every request.
        limits: on their verification; None if no request asks for any.
        traced: whether a request wants its rounds.
        presets: indices of the requests with a preset.
    """

    each: tuple[RequestOptions, ...]
    limits: RequestLimits | None
    traced: bool
    presets: tuple[int, ...]

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
            limits=RequestLimits(most, bounds if any(bounds) else None) if limited else None,
            traced=any(options.trace for options in each),
            presets=tuple(
                index
                for index, options in enumerate(each)
                if options.preset != NO_PRESET and options.copy_limit(max_verify) > 0
            ),
        )
