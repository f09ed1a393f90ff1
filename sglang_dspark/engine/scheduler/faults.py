"""Handles a failure: a line for the log, with the part of a step that failed, and the end of the server."""

import os
import signal
import traceback

import torch

_PARTS = {"decode": "decode", "_prefill": "prefill"}  # by the function of the worker
_AROUND_STAGES = ("run", "finish")  # functions of a step's executor, which call its stages
_REMEDIES = (
    (
        torch.OutOfMemoryError,
        "The device has no memory left: lower --mem-fraction-static or --max-running-requests",
    ),
    (
        torch.AcceleratorError,
        "A device reports an error later than it happens: CUDA_LAUNCH_BLOCKING=1 in the environment shows where",
    ),
)


def report(error: Exception, step: int, requests: int) -> str:
    """Return the line for the log about a numbered step of so many requests."""
    remedy = next((f". {text}" for kind, text in _REMEDIES if isinstance(error, kind)), "")
    return (
        f"DSPARK: step {step} of {requests} requests failed in {part_of(error)} ({type(error).__name__}: {error}). "
        "Shutting down: the K/V cache may be partially written. Running requests get an error and no further token"
        f"{remedy}"
    )


def part_of(error: Exception) -> str:
    """Return where in a step ``error`` was raised: ``decode: verify``, or ``prefill: inject_context``."""
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = next((place for place, name in enumerate(names) if name in _PARTS), None)
    if place is None:
        return "its preparation"
    inside = [name for name in names[place + 1 :] if name not in _AROUND_STAGES]
    return ": ".join([_PARTS[names[place]], *inside[:1]])


def end_server() -> None:
    """End this node's part of the server, as a process of SGLang does when it fails. Its parent is the front end."""
    os.kill(os.getppid(), signal.SIGQUIT)
