"""Measures what a step takes a GPU, and how long the host waits for it, without a wait of its own."""

import time
from itertools import cycle
from typing import Any

import torch

# Spans that may not have been read: of the step that is launched, of the one before, and one to spare.
_SPANS = 3


class DeviceSpan:
    """Two events around what is launched between them in the current stream; off a GPU they are None."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if on_gpu else None

    def begin(self) -> None:
        """Count what is launched from here on."""
        if self._events is not None:
            self._events[0].record()

    def end(self) -> None:
        """Count what was launched until here."""
        if self._events is not None:
            self._events[1].record()

    @property
    def ms(self) -> float | None:
        """Return the milliseconds; None off a GPU, and while the device is not done."""
        if self._events is None or not self._events[1].query():
            return None
        return float(self._events[0].elapsed_time(self._events[1]))


class DeviceTimer:
    """Spans that take turns: one may be read until two more have begun."""

    def __init__(self, device: torch.device) -> None:
        self._spans = cycle([DeviceSpan(device) for _ in range(_SPANS)])

    def begin(self) -> DeviceSpan:
        """Return the span of the step that is about to be launched."""
        span = next(self._spans)
        span.begin()
        return span


class AwaitedEvent:
    """An event of a device that knows how long it was waited for; everything else is its own."""

    def __init__(self, event: Any) -> None:
        self._event = event
        self.waited_ms = 0.0

    def synchronize(self) -> None:
        """Wait for the event."""
        began = time.perf_counter()
        self._event.synchronize()
        self.waited_ms += (time.perf_counter() - began) * 1e3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)
