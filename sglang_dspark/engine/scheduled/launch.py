"""A start of SGLang's own DSPARK under our schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglang_dspark.config import DSparkConfig, flag_dest, flag_name
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.errors import ConfigError

_MODE, _RAGGED = "SGLANG_RAGGED_VERIFY_MODE", "compact"


@dataclass(frozen=True)
class ScheduledServer:
    """A server that decodes with SGLang's own DSPARK, by our schedule.

    Attributes:
        config: our options.
    """

    config: DSparkConfig

    has_confidence_head = True  # the worker starts with no other drafter
    presets = False

    @classmethod
    def before(cls, args: ServerArgs, config: DSparkConfig) -> None:
        """Prepare ``args`` for SGLang to resolve them.

        Raises:
            ConfigError: options that belong to our own worker.
        """
        for name, value, neutral in (
            ("draft_free", config.draft_free, False),
            ("simulate_acceptance", config.simulate_acceptance, None),
            ("fallback", config.fallback, "refuse"),
        ):
            if value != neutral:
                raise ConfigError(
                    f"{flag_name(name)}={value} belongs to our own worker, and {flag_name('engine')} scheduled takes "
                    "SGLang's; drop one of them"
                )
        mode = os.environ.setdefault(_MODE, _RAGGED)  # SGLang reads it in every process
        if mode != _RAGGED:
            raise ConfigError(
                f"{_MODE}={mode} asks for another verification than {flag_name('engine')} scheduled; unset it"
            )
        # SGLang would read them in forms of its own.
        for name in ("sps_table_path", "confidence_sts_path"):
            setattr(args, flag_dest(name), None)
        arguments.attach(args, cls(config))
