"""A start of SGLang's own worker under our schedule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from sglang_dspark.config import DSparkConfig, flag_dest, flag_name
from sglang_dspark.declared import truncate
from sglang_dspark.engine.compat.arguments import attached
from sglang_dspark.engine.sglang_types import SamplingParams, ServerArgs
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.own_worker.lengths import why_one_length

MODE = "SGLANG_RAGGED_VERIFY_MODE"
"""Variable that SGLang's own worker reads in its schedulers: whether requests verify different numbers of rows."""
_BY_REQUEST = {"compact": True, "static": False}
_IGNORED = (("min_p", 0.0), ("sampling_seed", None))
"""Parameters of requests that SGLang's own worker ignores, and the values with which it is right to do so."""


@dataclass(frozen=True)
class ScheduledServer:
    """A server that decodes with SGLang's own worker, by our schedule.

    Attributes:
        config: our options.
        reason: why by this worker, and how much a step verifies.
        by_request: whether each request verifies a length of its own.
    """

    config: DSparkConfig
    reason: str
    by_request: bool = False

    engine: ClassVar[str] = "scheduled"
    takes_candidates: ClassVar[bool] = False

    @property
    def has_confidence_head(self) -> bool:
        """Return whether the worker has the drafter's: with one length for all it builds none."""
        return self.by_request

    @classmethod
    def before(cls, args: ServerArgs, config: DSparkConfig, because: str) -> ScheduledServer:
        """Prepare ``args`` for SGLang to resolve them, and return the server as far as it is known.

        Args:
            because: why this worker is taken.

        Raises:
            ConfigError: options that belong to our own worker, or a variable that asks for another verification.
        """
        for name, value, neutral in (
            ("draft_free", config.draft_free, False),
            ("simulate_acceptance", config.simulate_acceptance, None),
            ("answer_cache", config.answer_cache, None),
            ("tpot_ms", config.tpot_ms, None),
            ("ttft_ms", config.ttft_ms, None),
            ("max_gap_ms", config.max_gap_ms, None),
            ("prompt_rows", config.prompt_rows, None),
            ("draft_vocabulary", config.draft_vocabulary, None),
            ("draft_quantization", config.draft_quantization, None),
            ("fallback", config.fallback if config.engine == "scheduled" else "refuse", "refuse"),
        ):
            if value != neutral:
                raise ConfigError(
                    f"{flag_name(name)}={value} belongs to our own worker, and {flag_name('engine')} scheduled takes "
                    "SGLang's; drop one of them"
                )
        if args.enable_return_routed_experts:
            raise ConfigError(
                "--enable-return-routed-experts needs our own worker: SGLang's hands on no experts of decode steps, "
                "and answers would have those of other tokens; drop it"
            )
        if os.environ.get(MODE, "static") not in _BY_REQUEST:
            raise ConfigError(
                f"{MODE}={os.environ[MODE]} asks for another verification than {flag_name('engine')} scheduled; unset "
                f"it, or set it to {' or '.join(_BY_REQUEST)}"
            )
        # SGLang would read them in forms of its own.
        for name in ("sps_table_path", "confidence_sts_path"):
            setattr(args, flag_dest(name), None)
        return cls(config, f"SGLang's own worker decodes by our schedule: {because}")

    def settled(self, args: ServerArgs) -> ScheduledServer:
        """Return the server with how much a step verifies, by the arguments that SGLang has resolved.

        Raises:
            ConfigError: an option needs a confidence head, and with one length for all there is none.
        """
        given = os.environ.get(MODE)
        why = why_one_length(args) if given is None else f"{MODE}={given}"
        by_request = why is None if given is None else _BY_REQUEST[given]
        path = self.config.confidence_sts_path
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
        return replace(self, reason=f"{self.reason}; {how}{f' ({why})' if why else ''}", by_request=by_request)

    def set_mode(self) -> None:
        """Tell SGLang, in the scheduler that is about to make its worker."""
        os.environ[MODE] = next(mode for mode, by_request in _BY_REQUEST.items() if by_request is self.by_request)

    def refusals(self, parameters: SamplingParams) -> Iterator[str]:
        """Yield a message for each parameter of a request that the worker would ignore."""
        for name, neutral in _IGNORED:
            if (value := getattr(parameters, name)) != neutral:
                yield (
                    f"SGLang's own worker ignores sampling_params.{name}={truncate(value)}; drop it, or start the "
                    f"server with {flag_name('engine')} plugin if that serves the target"
                )


def scheduled(args: ServerArgs) -> ScheduledServer:
    """Return what is attached to the arguments of a server that decodes with SGLang's own worker."""
    server = attached(args)
    assert isinstance(server, ScheduledServer), "SGLang's own worker does not decode"
    return server
