"""Collect the facts that start-up checks look at."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from sglang.srt.arg_groups.overrides import model_config_of

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.families import Family, family_of
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.engine.sglang_types import ModelConfig, ServerArgs


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
