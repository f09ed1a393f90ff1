"""Tells a request that new weights have reached what came of its drafts with each version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from sglang_dspark.calibration.fit import Verdict
from sglang_dspark.engine.batch import per_token
from sglang_dspark.fence import fenced, nothing

KEY = "dspark_versions"
"""Of SGLang's ``customized_info``, whose lists are parallel to a request's output tokens."""


class Spans:
    """Notes the counts of requests at the end of each version, and at their own if there is anything to say.

    The last entry that is not null is the whole list, oldest version first: tokens that were sent are not sent again.
    """

    def __init__(self) -> None:
        self._live: WeakSet[Any] = WeakSet()  # a request may end without a word

    @fenced("counts by version", instead=nothing)
    def begin(self, reqs: Iterable[Any]) -> None:
        """Remember requests that are about to be decoded."""
        self._live.update(reqs)

    @fenced("counts by version", instead=nothing)
    def end(self, version: str, fit: Verdict) -> None:
        """Note what all requests have come to with a version that ends now, at the token that comes next."""
        for req in self._live:
            _note(req, len(req.output_ids), version, fit)

    @fenced("counts by version", instead=nothing)
    def end_request(self, req: Any, version: str, fit: Verdict) -> None:
        """Note what an ended request has come to with its last version, if it had others, or if no drafter fits."""
        self._live.discard(req)
        if fit is Verdict.MISFIT or KEY in (req.customized_info or {}):
            _note(req, len(req.output_ids_through_stop) - 1, version, fit)


def _note(req: Any, token: int, version: str, fit: Verdict) -> None:
    entries = (req.customized_info or {}).get(KEY, [])
    spans: list[dict[str, Any]] = next((entry for entry in reversed(entries) if entry is not None), [])
    rounds, accepted = (
        total - sum(span[name] for span in spans)
        for name, total in (("rounds", req.spec_verify_ct), ("accepted_tokens", req.spec_num_correct_drafts))
    )
    if rounds:
        counts = {"rounds": rounds, "accepted_tokens": accepted, "accept_length": (accepted + rounds) / rounds}
        spans = [*spans, {"weight_version": version, "drafter_fit": str(fit), **counts}]
    if spans:
        per_token(req, KEY)[token:] = [*[None] * (token - len(entries)), spans]
