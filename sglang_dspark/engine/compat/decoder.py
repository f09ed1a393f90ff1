"""Finds what decodes in a scheduler: our worker, or what drives another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from sglang_dspark.metrics.reporting import Reporting
from sglang_dspark.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

_DECODER = "dspark_decoder"


class Decoder(Protocol):
    """The object that answers for the decode steps of a scheduler."""

    @property
    def schedule(self) -> Schedule:
        """Return what decides the steps."""

    @property
    def reporting(self) -> Reporting:
        """Return what counts them."""

    def capabilities(self) -> dict[str, Any]:
        """Return the JSON of ``GET /dspark/capabilities``."""


def attach_decoder(decoder: Decoder, *parts: object) -> None:
    """Put a decoder on SGLang's own worker, and on the parts of it that are hooked."""
    for part in parts:
        setattr(part, _DECODER, decoder)


def attached_decoder(part: Any) -> Decoder:
    """Return what :func:`attach_decoder` put there, or ``part`` itself: our worker is a decoder."""
    decoder: Decoder = getattr(part, _DECODER, part)
    return decoder


def decoder_of(scheduler: Scheduler) -> Decoder:
    """Return what answers for SGLang's scheduler."""
    return attached_decoder(scheduler.draft_worker)
