"""A start of SGLang's own DSPARK under our schedule."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from sglang_dspark.config import DSparkConfig, flag_dest, flag_name
from sglang_dspark.engine.builtin.lengths import why_one_length
from sglang_dspark.engine.compat import arguments
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.errors import ConfigError

MODE = "SGLANG_RAGGED_VERIFY_MODE"
"""Variable that SGLang's own DSPARK reads in its schedulers: whether requests verify different numbers of rows."""
_BY_REQUEST = {"compact": True, "static": False}


@dataclass(frozen=True)
class ScheduledServer:
    """A server that decodes with SGLang's own DSPARK, by our schedule.

    Attributes:
        config: our options.
        reason: why by this worker, and how much a step verifies.
        by_request: whether each request verifies a length of its own.
    """

    config: DSparkConfig
    reason: str
    by_request: bool = False

    engine = "scheduled"
    presets = False

    @property
    def has_confidence_head(self) -> bool:
        """Return whether the worker has the drafter's: with one length for all it builds none."""
        return self.by_request

    @classmethod
    def before(cls, args: ServerArgs, config: DSparkConfig, because: str) -> None:
        """Prepare ``args`` for SGLang to resolve them.

        Args:
            because: why this worker is taken.

        Raises:
            ConfigError: options that belong to our own worker, or a variable that asks for another verification.
        """
        for name, value, neutral in (
            ("draft_free", config.draft_free, False),
            ("simulate_acceptance", config.simulate_acceptance, None),
            ("answer_cache", config.answer_cache, None),
            ("fallback", config.fallback if config.engine == "scheduled" else "refuse", "refuse"),
        ):
            if value != neutral:
                raise ConfigError(
                    f"{flag_name(name)}={value} belongs to our own worker, and {flag_name('engine')} scheduled takes "
                    "SGLang's; drop one of them"
                )
        if os.environ.get(MODE, "static") not in _BY_REQUEST:
            raise ConfigError(
                f"{MODE}={os.environ[MODE]} asks for another verification than {flag_name('engine')} scheduled; unset "
                f"it, or set it to {' or '.join(_BY_REQUEST)}"
            )
        # SGLang would read them in forms of its own.
        for name in ("sps_table_path", "confidence_sts_path"):
            setattr(args, flag_dest(name), None)
        arguments.attach(args, cls(config, f"SGLang's own worker decodes by our schedule: {because}"))

    @staticmethod
    def settle(args: ServerArgs) -> None:
        """Decide how much a step verifies, by the arguments that SGLang has resolved.

        Raises:
            ConfigError: an option needs a confidence head, and with one length for all there is none.
        """
        server: ScheduledServer = arguments.attached(args)
        given = os.environ.get(MODE)
        why = why_one_length(args) if given is None else f"{MODE}={given}"
        by_request = why is None if given is None else _BY_REQUEST[given]
        path = server.config.confidence_sts_path
        if not by_request and path is not None:
            raise ConfigError(
                f"{flag_name('confidence_sts_path')}={path} calibrates a confidence head, and all requests of a step "
                f"verify as many drafts without one ({why}); drop the flag"
            )
        how = (
            "each request verifies its own number of drafts"
            if by_request
            else "all requests verify the same number of drafts"
        )
        reason = f"{server.reason}; {how}{f' ({why})' if why else ''}"
        arguments.attach(args, replace(server, reason=reason, by_request=by_request))

    def set_mode(self) -> None:
        """Tell SGLang, in the scheduler that is about to make its worker."""
        os.environ[MODE] = next(mode for mode, by_request in _BY_REQUEST.items() if by_request is self.by_request)
