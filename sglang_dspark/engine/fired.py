"""Which hooks SGLang has called in this process. A release may keep a function and call another one in its place.

A hook on such a function is applied and does nothing, without a word. So hooks that have to have been called by some
moment are looked for at that moment.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any

from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError


class Moment(Enum):
    """By when a hook has been called if it is called at all."""

    READY = "when the scheduler was ready"
    ANSWERED = "when the first request had been answered"
    SOME_TIME = "never for certain"


# By process: one that is forked inherits what another one waits for.
_awaited: defaultdict[tuple[int, Moment], dict[str, str]] = defaultdict(dict)


def awaited(name: str, target: str, moment: Moment, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, a hook on ``target``, whose first call is noted."""
    waiting = _awaited[os.getpid(), moment]
    waiting[name] = target

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        waiting.pop(name, None)
        return function(*args, **kwargs)

    return noting


def check(moment: Moment) -> None:
    """Call at ``moment``.

    Raises:
        EngineError: names a hook that ought to have been called by now, and has not been.
    """
    for name, target in _awaited[os.getpid(), moment].items():
        raise EngineError(
            f"sglang {installed_sglang()} had not called {target} {moment.value}, so the hook {name} is without "
            "effect; sglang-dspark cannot serve on this release as it is"
        )
