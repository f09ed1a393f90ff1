"""Describes a feature to the core: its flags, refusals and keys, and what it does on a server that uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Self

from msgspec import Struct
from sglang.srt.arg_groups.overrides import model_config_of

from sglang_dspark import features
from sglang_dspark.config import DSparkConfig
from sglang_dspark.declared import field_types
from sglang_dspark.draft.families import Family, family_of
from sglang_dspark.engine.server import Adjustment, DSparkServer, OtherServer
from sglang_dspark.engine.sglang_types import ModelConfig, ModelRunner, ServerArgs, TokenizerManager
from sglang_dspark.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.managers.scheduler import Scheduler

Where = Literal[
    "flags", "resolution", "front_end", "routes", "children", "any_worker", "scheduler", "cuda", "cpu", "simulated"
]
"""Where a hook is installed. ``flags``: in any process that reads SGLang's command line, of the core only.
``resolution``: in the one that resolves it for our worker. ``front_end``: in the one that
tokenizes requests and serves HTTP. ``routes``: the same, also when the target decodes without drafts. ``children``:
all processes except the first, which are not told what they are: the one that detokenizes, the one that starts
replicas, and schedulers. ``scheduler``: in that of our worker, on ``cuda`` or ``cpu`` as well. ``any_worker``: in that
of whatever worker decodes. ``simulated``: in every one of a server whose environment simulates acceptance."""

GPUS = ("cuda",)
"""Devices that have SGLang's own kernels, and memory of their own next to the host's pinned memory."""


@dataclass(frozen=True)
class LaunchContext:
    """The facts that checks look at.

    Attributes:
        args: SGLang's arguments, with what SGLang has decided about them by then.
        server: our options, and the drafter; without the drafter for checks of ``Stage.OPTIONS``.
    """

    args: ServerArgs
    server: DSparkServer

    @classmethod
    def of(cls, args: ServerArgs, config: DSparkConfig) -> Self:
        """Return what is known before the drafter is."""
        return cls(args, DSparkServer(config, drafter=None, dummy_draft=False))

    @cached_property
    def target(self) -> ModelConfig:
        """Return SGLang's configuration of the target."""
        return model_config_of(self.args)

    @property
    def family(self) -> Family:
        """Return the target's family; raise :class:`UnservedError` if it is of a class that is not served."""
        return family_of(self.target.hf_config.architectures)

    @property
    def text_config(self) -> Any:
        """Return transformers' configuration of the target's text; those of unserved classes may have other keys."""
        _ = self.family
        return self.target.hf_text_config


class Stage(Enum):
    """The facts that a check needs."""

    OPTIONS = "before SGLang resolves its arguments"
    FLAGS = "when SGLang has resolved its arguments"
    MODELS = "as FLAGS, and by `doctor`: target, drafter and device decide"


@dataclass(frozen=True)
class Check:
    """One thing that a start can be refused for.

    Attributes:
        name: of the check.
        stage: when it can be made.
        find: returns what is wrong, with flag, value and remedy, or None. It may raise ``ConfigError`` or
            ``CheckpointError`` with such a message instead.
        unserved: whether ``--speculative-dspark-fallback target-only`` serves the target without drafts then.
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


@dataclass(frozen=True)
class FlagRule:
    """A flag that DSPARK serves with some values only.

    Attributes:
        name: the field of ``ServerArgs``.
        served: values that are served; the first one takes the place of others if the rule ``adjusts``.
        reason: why others are not served, or what to do instead.
        adjusts: whether other values change only speed: the start goes on without them. Others end it.
        applies: whether the rule holds on a server; asked of values that are not served.
    """

    name: str
    served: tuple[object, ...]
    reason: str = "drop the flag"
    adjusts: bool = False
    applies: Callable[[LaunchContext], bool] = lambda context: True

    def serves(self, args: ServerArgs) -> bool:
        """Return whether ``args`` have a value that is served everywhere."""
        return getattr(args, self.name) in self.served

    def adjustment(self, args: ServerArgs) -> Adjustment:
        """Return what becomes of the value that ``args`` have."""
        given, value = getattr(args, self.name), self.served[0]
        instead = "is dropped" if value in (None, False) else f"becomes {value}"
        return Adjustment(self.name, value, f"{flag_of(self.name)}={given} {instead}: {self.reason}")

    def refusal(self, args: ServerArgs) -> str:
        """Return why a start with the value that ``args`` have ends."""
        return f"DSPARK cannot run with {flag_of(self.name)}={getattr(args, self.name)}; {self.reason}"


def off_gpu(context: LaunchContext) -> bool:
    """Return whether a server runs on a device that only PyTorch has kernels for."""
    return context.args.device not in GPUS


def flag_of(name: str) -> str:
    """Return the flag of a field of ``ServerArgs``."""
    return "--" + name.replace("_", "-")


class RequestKeys(Struct, frozen=True, omit_defaults=True):
    """Keys of the field ``speculation``: their types are checked in the front end, and they travel to the scheduler.

    Every field has a default; all defaults together ask for nothing.
    """

    MADE = frozenset[str]()
    """Fields that are no keys: :meth:`for_scheduler` fills them."""

    @classmethod
    def key_types(cls) -> dict[str, Any]:
        """Return the types of the keys."""
        return {key: kind for key, kind in field_types(cls).items() if key not in cls.MADE}

    @classmethod
    def unserved(cls, server: DSparkServer | OtherServer) -> Collection[str]:
        """Return the keys that have no effect on a server."""
        return ()

    def for_scheduler(self, given: Collection[str], manager: TokenizerManager) -> Self:
        """Return what travels to the scheduler.

        Args:
            given: keys that are in the field.
            manager: SGLang's, in the front end.

        Raises:
            ValueError: keys do not go together, or the server does not serve one; names it, its value and the remedy.
        """
        return self


@dataclass(frozen=True)
class Feature:
    """A feature as its module declares it, or the ``__init__`` of its folder. Its hooks are those of its modules.

    Attributes:
        package: its module or folder, as one would import it.
        is_used: whether a server with these arguments, as the operator wrote them, uses the feature. Its hooks are
            installed only then.
        flag_rules: flags of SGLang that it adjusts or refuses, on every server.
        request_keys: read on every server.
        checks: made on every server.
        part: makes its part, as :meth:`~.part.Part.of` does.
        of_any_worker: whether the part also serves another worker than ours, by ``ready``, ``step_done``,
            ``weights_changed`` and ``report`` only: ``part`` takes a :class:`~.scheduler.StepDriver` then.
        routes: adds routes and middleware to SGLang's application, on servers that use the feature. It takes the
            application, inside what reads the field ``speculation``, and why the target decodes without drafts, None
            if it does not.
        describe_target: takes SGLang's runner of a target, and returns what ``GET /dspark/capabilities`` says of it, by
            key; on every server, of either worker.
        other_server: its worker decodes in place of ours where it is asked for.
        answers: takes SGLang's scheduler, which begins to listen, and calls :func:`~.scheduler.answer_with` for the
            requests that the feature answers; on servers that use the feature, of either worker.
    """

    package: str
    is_used: Callable[[ServerArgs], bool]
    flag_rules: tuple[FlagRule, ...] = ()
    request_keys: type[RequestKeys] | None = None
    checks: tuple[Check, ...] = ()
    part: Callable[[Any], Any] = lambda worker: None
    of_any_worker: bool = False
    routes: Callable[[FastAPI, str | None], None] = lambda app, target_only: None
    describe_target: Callable[[ModelRunner], Mapping[str, object]] = lambda runner: {}
    other_server: type[OtherServer] | None = None
    answers: Callable[[Scheduler], None] = lambda scheduler: None

    @property
    def name(self) -> str:
        """Return the name of its module or folder."""
        return self.package.rpartition(".")[2]


@cache
def all_features() -> tuple[Feature, ...]:
    """Import and return the features in the order of their lines. No part may depend on the order of parts."""
    return tuple(resolve_name(f"{features.__name__}.{name}:FEATURE") for name in features.FEATURES)
