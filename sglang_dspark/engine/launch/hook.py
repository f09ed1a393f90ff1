"""Describe a patch of SGLang."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Literal

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hook_checks import Moment

Where = Literal["flags", "front_end", "routes", "children", "any_worker", "scheduler", "cuda", "cpu", "simulated"]


@dataclass(frozen=True)
class Hook:
    """One patch of one SGLang function.

    Attributes:
        target: the function of SGLang, as one would import it.
        kind: how the handler stands to it.
        handler: our function, below ``sglang_dspark``. A name, so that a process imports only what it installs.
        where: the process. ``flags``: any that reads SGLang's command line. ``front_end``: the one that tokenizes
            requests and serves HTTP. ``routes``: the same, also when the target decodes alone. ``children``: all but
            the first, which are not told what they are: the one that makes text of tokens, the one that starts
            replicas, and schedulers.
            ``scheduler``: that of our worker, on ``cuda`` or ``cpu`` as well. ``any_worker``: that of whatever worker
            decodes. ``simulated``: every one of a server whose environment simulates acceptance.
        reason: why SGLang has to be patched there.
        by: the moment by which SGLang must have called it.
    """

    target: str
    kind: HookType
    handler: str
    where: Where
    reason: str
    by: Moment = Moment.ANSWERED

    @property
    def name(self) -> str:
        """Return what messages and logs call it: our function, and that of SGLang."""
        return f"{self.handler} on {self.target.rpartition('.')[2]}"

    def load_target(self) -> Callable[..., object]:
        """Import and return the function that is patched."""
        return resolve_name(self.target)

    def load_handler(self) -> Callable[..., object]:
        """Import and return our function."""
        return resolve_name(f"sglang_dspark.{self.handler}")
