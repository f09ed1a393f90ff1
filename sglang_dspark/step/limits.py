"""Limits that single requests set for their own verification, whatever the policy would do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on the drafts verified per request, all of them fixed before the step's noise is drawn.

    Attributes:
        max_verify: [bs] the most drafts that may be verified.
        thresholds: [bs] a request's drafts are verified up to the first one whose raw confidence is below this; 0 for
            no such bound. None when no request has one. The confidence of a draft is known before the draft is drawn,
            and drafts are cut from the end of a block, so this decides about no draft by its own value or a later one.
    """

    max_verify: tuple[int, ...]
    thresholds: tuple[float, ...] | None = None
