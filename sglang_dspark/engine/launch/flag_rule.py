"""Describe a flag of SGLang that is served with some values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_dspark.engine.sglang_types import ServerArgs

if TYPE_CHECKING:
    from sglang_dspark.engine.launch.context import LaunchContext


GPUS = ("cuda",)
"""Devices that have SGLang's own kernels, and memory beside pinned memory of the host."""


@dataclass(frozen=True)
class Adjustment:
    """A flag that a start changes before SGLang reads it.

    Attributes:
        name: the field of ``ServerArgs``.
        value: what it becomes.
        said: flag, values and reason, for the operator.
    """

    name: str
    value: object
    said: str


@dataclass(frozen=True)
class FlagRule:
    """A flag that DSPARK serves with some values only.

    Attributes:
        name: the field of ``ServerArgs``.
        served: values that are served; the first one takes the place of others if the rule ``adjusts``.
        reason: why others are not served, or what to do instead.
        adjusts: whether other values change speed alone: the start goes on without them. Others end it.
        beside: whether the rule holds on a server; asked of values that are not served.
    """

    name: str
    served: tuple[object, ...]
    reason: str = "drop the flag"
    adjusts: bool = False
    beside: Callable[[LaunchContext], bool] = lambda context: True

    def serves(self, args: ServerArgs) -> bool:
        """Return whether ``args`` have a value that is served everywhere."""
        return getattr(args, self.name) in self.served

    def adjustment(self, args: ServerArgs) -> Adjustment:
        """Return what becomes of the value that ``args`` have."""
        given, value = getattr(args, self.name), self.served[0]
        return Adjustment(self.name, value, f"{flag_of(self.name)}={given} becomes {value}: {self.reason}")

    def refusal(self, args: ServerArgs) -> str:
        """Return why a start with the value that ``args`` have ends."""
        return f"DSPARK cannot run with {flag_of(self.name)}={getattr(args, self.name)}; {self.reason}"


def off_gpu(context: LaunchContext) -> bool:
    """Return whether a server runs on a device that only PyTorch has kernels for."""
    return context.args.device not in GPUS


def flag_of(name: str) -> str:
    """Return the flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")
