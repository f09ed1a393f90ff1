"""Holds what start-up has decided about a server. It travels on SGLang's arguments to every process.

Of ``ServerArgs``, fields hold what the operator wrote; what SGLang decides about them stands next to them.
"""

from __future__ import annotations

import copy
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import sglang.srt.environ as environ
import sglang.srt.runtime_context as runtime_context
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.arg_groups.model_path_hook import handle_model_source_paths
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.arg_groups.serving_hook import handle_missing_default_values
from sglang.srt.server_args import ServerArgs as Record

from sglang_dspark.config import MOST_TAIL, DSparkConfig
from sglang_dspark.draft.backbone import DraftWindow
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine.sglang_types import SamplingParams, ServerArgs


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
class DSparkServer:
    """A server that decodes with our worker.

    Attributes:
        config: our options.
        drafter: None if none is served.
        dummy_draft: whether its weights are random.
        draft_window: of the context, that the drafter sees; None for all that its layers see.
        same_bits: whether the operator passes ``--enable-deterministic-inference``.
        adjustments: flags that the start has changed.
    """

    config: DSparkConfig
    drafter: ResolvedDrafter | None
    dummy_draft: bool
    draft_window: DraftWindow | None = None
    same_bits: bool = False
    adjustments: tuple[Adjustment, ...] = ()

    engine: ClassVar[str] = "plugin"
    takes_candidates: ClassVar[bool] = True

    @property
    def adjusted(self) -> tuple[str, ...]:
        """Return the flags that the start has changed, with values and reasons."""
        return tuple(adjustment.said for adjustment in self.adjustments)

    @property
    def draft_path(self) -> str:
        """Return the folder of the drafter; empty if none is served."""
        return "" if self.drafter is None else self.drafter.path

    @property
    def timed(self) -> dict[str, str]:
        """Return what step times depend on besides the drafter's configuration, by name."""
        proposed = 0 if self.drafter is None else self.drafter.num_proposed
        return {
            "proposed": str(proposed),
            "draft_quantization": str(self.config.draft_quantization),
            "unproven": ",".join(sorted(self.config.unproven)),
        }

    @property
    def has_confidence_head(self) -> bool:
        """Return whether the drafter says how likely a draft survives."""
        return self.drafter is not None and self.drafter.config.predicts_acceptance

    @property
    def gamma(self) -> int:
        """Return the drafts per request and step.

        Raises:
            ConfigError: our options ask for more than the drafter makes.
        """
        if self.drafter is None:
            return self.config.gamma(None)
        # Without confidences, nothing tells if the chain reaches a slot that only it can fill.
        return self.config.gamma(self.drafter.config.gamma, MOST_TAIL if self.has_confidence_head else 0)

    @property
    def window(self) -> int:
        """Return the tokens that a step verifies per request at most: the anchor, and drafts.

        Raises:
            ConfigError: our options ask for more drafts than a block has.
        """
        return self.config.max_verify(self.gamma) + 1


@dataclass(frozen=True)
class OtherServer(ABC):
    """A server that decodes with another worker than ours, with our schedule. Made as far as our options say it.

    Attributes:
        config: our options.
        engine: value of ``--speculative-dspark-engine`` that asks for the worker.
        takes_candidates: whether it verifies drafts that are not its drafter's.
    """

    config: DSparkConfig

    engine: ClassVar[str]
    takes_candidates: ClassVar[bool]

    @property
    @abstractmethod
    def reason(self) -> str:
        """Return why the worker decodes, and how."""

    @property
    @abstractmethod
    def has_confidence_head(self) -> bool:
        """Return whether the worker knows how likely a draft survives."""

    @abstractmethod
    def prepare(self, args: ServerArgs) -> None:
        """Prepare ``args`` for SGLang to resolve them.

        Raises:
            ConfigError: our options or the arguments ask for what the worker does not have.
        """

    @abstractmethod
    def settled(self, args: ServerArgs) -> Self:
        """Return the server with what follows from the arguments, which SGLang has resolved.

        Raises:
            ConfigError: the worker would not serve them right.
        """

    @abstractmethod
    def refusals(self, parameters: SamplingParams) -> Iterator[str]:
        """Yield a message for each parameter of a request that the worker would not follow."""


@dataclass(frozen=True)
class TargetOnly:
    """A plain server that was to decode with DSPARK, and decodes with the target only. Our routes say why.

    Attributes:
        reason: why.
    """

    reason: str


Attached = DSparkServer | OtherServer | TargetOnly
"""What DSPARK attaches to SGLang's arguments."""


# SGLang keeps attributes with an underscore next to the fields, also when it sends the object to another process.
_OURS, _START = "_dspark", "_dspark_start"


def attach(args: ServerArgs, ours: Attached) -> None:
    """Put what DSPARK has decided on the arguments; it travels with them to the scheduler."""
    setattr(args, _OURS, ours)
    setattr(args, _START, uuid.uuid4().hex)


def attached(args: ServerArgs) -> Attached | None:
    """Return what :func:`attach` put there; None if DSPARK was not asked for."""
    return getattr(args, _OURS, None)


def name_of_start(args: ServerArgs) -> str:
    """Return a name that no other start of a server has, the same in all processes of this one."""
    return getattr(args, _START)


def speculating(args: ServerArgs) -> DSparkServer | OtherServer | None:
    """Return the server that :func:`attach` put on these arguments; None if it does not decode with DSPARK."""
    server = attached(args)
    return None if isinstance(server, TargetOnly) else server


def tokens_per_step() -> int:
    """Return the most tokens that a step verifies per request, in a process that serves."""
    return int(runtime_context.get_spec().speculative_num_draft_tokens)


def attached_to_ours(args: ServerArgs) -> DSparkServer:
    """Return the server that :func:`attach` put on these arguments, which decodes with our worker."""
    server = attached(args)
    assert isinstance(server, DSparkServer), "these arguments are not of a server with our worker"
    return server


def looked_up(args: ServerArgs) -> ServerArgs:
    """Return a view of a copy of ``args`` for which SGLang has looked up the target's files and the device.

    These are the first things that it does when it resolves ``args``, which stay as they are.
    """
    looked: Any = copy.copy(args)
    vars(looked).update(vars(args))
    looked.speculative_draft_model_path = None  # see flags.prepare_arguments
    looked._resolved_overrides = list(getattr(args, "_resolved_overrides", ()))
    handle_model_source_paths(looked)
    handle_missing_default_values(looked)
    return resolving_view(looked)


Snapshot = tuple[dict[str, object], dict[str, object]]


def snapshot(args: ServerArgs) -> Snapshot:
    """Return the fields of ``args``, and the attributes next to them."""
    return {field.name: getattr(args, field.name) for field in record_fields(Record)}, dict(vars(args))


def restore(args: ServerArgs, written: Snapshot) -> None:
    """Give ``args`` the fields and attributes of a snapshot, of their own or of other arguments."""
    values, attributes = written
    vars(args).clear()  # one of the attributes seals the fields
    for name, value in values.items():
        setattr(args, name, value)
    vars(args).update(attributes)


def variables_of_sglang(prefix: str) -> frozenset[str]:
    """Return the environment variables that SGLang itself reads and whose names start with ``prefix``."""
    return frozenset(name for name in dir(environ.envs) if name.startswith(prefix))
