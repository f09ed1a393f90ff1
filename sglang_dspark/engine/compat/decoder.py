"""Finds what decodes in a scheduler: our worker, or what drives another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.engine.part import Part
from sglang_dspark.engine.sglang_types import ServerArgs, TpModelWorker
from sglang_dspark.scheduling.schedule import Schedule

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_dspark.engine.scheduler.step_control import StepControl

_DECODER = "dspark_decoder"


@dataclass(frozen=True)
class Decoding:
    """Say how a server decodes.

    Attributes:
        reason: why by this path.
        gamma: drafts of a block.
        cuda_graphs: whether steps are replayed from CUDA graphs.
        drafter: what is known of its checkpoint, as JSON; None if none is served.
        proposed: [V + 1] whether it proposes a token, and True, as is in force at any time; None if it may propose all.
    """

    reason: str
    gamma: int
    cuda_graphs: bool
    drafter: dict[str, Any] | None
    proposed: NDArray[np.bool_] | None = None


class Decoder(Protocol):
    """The object that answers for the decode steps of a scheduler.

    Attributes:
        server_args, target_worker: SGLang's.
        schedule: what decides the steps.
        parts: what features do with them.
        control: of the steps.
    """

    server_args: ServerArgs
    target_worker: TpModelWorker
    schedule: Schedule
    parts: Sequence[Part]
    control: StepControl

    @property
    def drafter(self) -> Any:
        """Return our worker's, with a network or without; None if another worker drafts."""

    def weights_changed(self, *, new_drafter: bool = False) -> None:
        """Follow weights that were written between two steps, in whole or in part. All ranks call it.

        Args:
            new_drafter: whether another drafter has taken the place of the one before.
        """

    def decoding(self) -> Decoding:
        """Return how the server decodes, once it is ready."""


def attach_decoder(decoder: Decoder, *parts: object) -> None:
    """Put a decoder on SGLang's own worker, and on the parts of it that are hooked."""
    for part in parts:
        setattr(part, _DECODER, decoder)


def attached_decoder(part: Any) -> Decoder:
    """Return what :func:`attach_decoder` put there, or ``part`` itself: our worker is a decoder."""
    return getattr(part, _DECODER, part)


def decoder_of(scheduler: Scheduler) -> Decoder:
    """Return what answers for SGLang's scheduler."""
    return attached_decoder(scheduler.draft_worker)
