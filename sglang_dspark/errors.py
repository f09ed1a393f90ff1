"""Exceptions raised by sglang-dspark, and :func:`best_effort` for what only advises.

Every message names the flag, key or tensor, the value that was found, and what to do instead.

Where something that only advises fails for a request, that request goes on without it, and no other one notices. What a
step has to do is not wrapped: a fault there may have left K/V half written, and ends the server.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger(__name__)


class DSparkError(Exception):
    """Base class of all errors raised by this package."""


class ConfigError(DSparkError, ValueError):
    """A flag, environment variable or combination of server arguments that cannot work."""


class UnservedError(ConfigError):
    """A device, target or pair that DSPARK does not serve, whatever the options."""


class CheckpointError(DSparkError, ValueError):
    """A draft checkpoint that is missing, incomplete, misshapen or unfit for the target."""


class BusyError(DSparkError, RuntimeError):
    """The scheduler does not answer a question in time."""


class EngineError(DSparkError, RuntimeError):
    """This SGLang is not one the plugin can drive, or a hook did not take effect."""


class LaunchError(DSparkError, RuntimeError):
    """A server that was started as a child process died or never answered."""


P = ParamSpec("P")
T = TypeVar("T")

FAILURES: Counter[str] = Counter()
"""Calls that have failed in this process, by the name of what failed."""


def best_effort(what: str, instead: Callable[..., Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions that advise.

    If such a function raises, that is counted, and the log says so the first time.

    Args:
        what: names what the function gives, in the plural.
        instead: returns the value in its place, from the same arguments.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except Exception:
                FAILURES[what] += 1
                if FAILURES[what] == 1:
                    logger.exception("DSPARK: %s failed and are left out; later failures are only counted", what)
                return instead(*args, **kwargs)

        return guarded

    return decorate


def nothing(*_args: object, **_kwargs: object) -> None:
    """Return None, in the place of a function that returns nothing."""
