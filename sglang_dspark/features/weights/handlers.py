"""Handle the hooks of the scheduler process; ``__init__.py`` says where each stands and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_dspark.engine.compat.decoder import decoder_of

logger = logging.getLogger(__name__)

_MEETING = ("UpdateWeightsFromTensor", "UpdateWeightsFromIPC", "EndWeightUpdate")
"""Requests at whose end all ranks wait for each other."""


def write(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Have SGLang write weights between two steps, and follow them.

    Weights that do not fit are the fault of the request, not of the server: it says so and serves what it has.
    """
    decoder = decoder_of(manager.scheduler)
    try:
        answer = original(manager, request)
    except Exception as error:
        logger.exception("DSPARK: new weights could not be written")
        answer = _failed(request, error)
        if type(request).__name__.startswith(_MEETING):
            torch.distributed.barrier(group=manager.tp_cpu_group)
    decoder.weights_changed()
    return _agreed(answer, manager.tp_cpu_group)


def _failed(request: Any, error: Exception) -> Any:
    """Return what SGLang answers to a request that failed."""
    from sglang.srt.managers import io_struct

    answer = getattr(io_struct, type(request).__name__.replace("ReqInput", "ReqOutput"))
    return answer(
        success=False,
        message=f"new weights could not be written ({type(error).__name__}: {error}). The server goes on with what it "
        "has, which may be new in part: send weights that fit this model, all of them",
    )


def _agreed(answer: Any, ranks: Any) -> Any:
    """Return the first answer of any rank that failed; SGLang would answer for rank 0 alone."""
    if torch.distributed.get_world_size(group=ranks) == 1:
        return answer
    answers = [None] * torch.distributed.get_world_size(group=ranks)
    torch.distributed.all_gather_object(answers, answer, group=ranks)
    return next((one for one in answers if not one.success), answer)
