"""Notes which hooks SGLang has called in this process. A release may keep a function and call another one instead.

A hook on such a function is applied and does nothing, without a word. So every hook says by which moment it must have
been called, and is looked for then.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from sglang_dspark.engine.support import installed_sglang
from sglang_dspark.errors import EngineError

T = TypeVar("T")


class Moment(Enum):
    """The moment by which a hook has been called if it is called at all."""

    READY = "when the scheduler was ready"
    ANSWERED = "when the first request had been answered"
    SOME_TIME = "never for certain"


# By process: a forked one inherits what its parent expects.
_expected: defaultdict[tuple[int, Moment], dict[str, str]] = defaultdict(dict)


def expect_called(name: str, target: str, moment: Moment, function: Callable[..., T]) -> Callable[..., T]:
    """Return ``function``, a hook on ``target``, wrapped so that its first call is noted."""
    expected = _expected[os.getpid(), moment]
    expected[name] = target

    @functools.wraps(function)
    def noting(*args: object, **kwargs: object) -> T:
        expected.pop(name, None)
        return function(*args, **kwargs)

    return noting


def check(moment: Moment) -> None:
    """Refuse to go on if a hook that must have been called by ``moment`` has not been.

    Raises:
        EngineError: names the hook.
    """
    for name, target in _expected[os.getpid(), moment].items():
        raise EngineError(
            f"sglang {installed_sglang()} had not called {target} {moment.value}, so the hook {name} has no effect; "
            "sglang-dspark cannot serve on this release as it is"
        )
