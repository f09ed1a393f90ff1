"""Read the options that requests have for their own verification. The front end has checked them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from dspark_kernels import LEAST_MATCH, MOST_MATCH

from sglang_dspark.speculation import COPYING, KEY, NO_PRESET, RequestOptions
from sglang_dspark.step.limits import RequestLimits
from sglang_dspark.step.transfers import host_index

_NOTHING = RequestOptions()
_NEVER = MOST_MATCH + 1


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
        presets: indices of the requests whose presets copy.
        least_match: [bs] int64, see :func:`dspark_kernels.suffix_match`; None if all requests have the usual one.
    """

    each: tuple[RequestOptions, ...]
    limits: RequestLimits | None
    traced: bool
    presets: tuple[int, ...]
    least_match: torch.Tensor | None

    @classmethod
    def of(cls, reqs: Sequence[Any], max_verify: int, device: torch.device) -> BatchOptions:
        """Read the options of a batch.

        Args:
            max_verify: most drafts that the server verifies per request and step.
            device: where steps are.
        """
        each = tuple(map(request_options, reqs))
        most = tuple(options.verify_limit(max_verify) for options in each)
        bounds = tuple(options.confidence_threshold for options in each)
        least = [_NEVER if options.preset == NO_PRESET else LEAST_MATCH for options in each]
        limited = min(most) < max_verify or any(bounds)
        return cls(
            each=each,
            limits=RequestLimits(most, bounds if any(bounds) else None) if limited else None,
            traced=any(options.trace for options in each),
            presets=tuple(
                index
                for index, options in enumerate(each)
                if options.preset in COPYING and options.copy_limit(max_verify) > 0
            ),
            least_match=host_index(least, device) if _NEVER in least else None,
        )
