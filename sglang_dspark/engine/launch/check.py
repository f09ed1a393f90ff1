"""Describe what a start can be refused for."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.errors import CheckpointError, ConfigError


class Stage(Enum):
    """The facts that a check needs."""

    OPTIONS = "before SGLang resolves its arguments"
    FLAGS = "when SGLang has resolved its arguments"
    MODELS = "as FLAGS, and by `doctor`: target, drafter and device decide"


@dataclass(frozen=True)
class Check:
    """One thing that a start can be refused for.

    Attributes:
        name: of what it looks at.
        stage: when it can be made.
        find: returns what is wrong, with flag, value and remedy, or None. It may raise ``ConfigError`` or
            ``CheckpointError`` with such a message instead.
        unserved: whether ``--speculative-dspark-fallback target-only`` serves the target alone then.
    """

    name: str
    stage: Stage
    find: Callable[[LaunchContext], str | None]
    unserved: bool = False

    def message(self, context: LaunchContext) -> str | None:
        """Return what is wrong, or None."""
        try:
            return self.find(context)
        except (ConfigError, CheckpointError) as error:
            return str(error)
