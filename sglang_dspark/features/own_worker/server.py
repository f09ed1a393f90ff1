"""A start of SGLang's own worker under our schedule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_dspark.config import DSparkConfig, flag_dest, flag_name
from sglang_dspark.declared import truncate
from sglang_dspark.engine.server import attached
from sglang_dspark.engine.sglang_types import SamplingParams, ServerArgs
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.own_worker.lengths import why_one_length

MODE = "SGLANG_RAGGED_VERIFY_MODE"
"""Variable that SGLang's own worker reads in its schedulers: whether requests verify different numbers of rows."""
_BY_REQUEST, _ALIKE = "compact", "static"
_SERVED = set(
    "schedule block_size verify_len confidence_threshold confidence_sts_path online_calibration sps_table_path engine "
    "untested_sglang".split()
)
"""Our options that this worker has a use for."""
_IGNORED = (("min_p", 0.0), ("sampling_seed", None))
"""Parameters of requests that SGLang's own worker ignores, and the values with which it is right to do so."""


@dataclass(frozen=True)
class ScheduledServer:
    """A server that decodes with SGLang's own worker, by our schedule.

    Attributes:
        config: our options.
        reason: why by this worker, and how much a step verifies.
        by_request: whether each request verifies a length of its own.
        refusal: why our worker does not decode; empty if this one was asked for.
    """

    config: DSparkConfig
    reason: str
    by_request: bool = False
    refusal: str = ""

    engine: ClassVar[str] = "scheduled"
    takes_candidates: ClassVar[bool] = False

    @property
    def has_confidence_head(self) -> bool:
        """Return whether the worker has the drafter's: with one length for all it builds none."""
        return self.by_request

    @classmethod
    def asked(cls, config: DSparkConfig, because: str, refusal: str = "") -> ScheduledServer:
        """Return the server as far as it is known before SGLang has resolved the arguments.

        Args:
            because: why this worker is taken.
        """
        return cls(config, f"SGLang's own worker decodes by our schedule: {because}", refusal=refusal)

    def prepare(self, args: ServerArgs) -> None:
        """Prepare ``args`` for SGLang to resolve them.

        Raises:
            ConfigError: options that belong to our own worker, or a variable that asks for another verification.
        """
        config = self.config
        served = _SERVED if config.engine == "scheduled" else _SERVED | {"fallback"}
        for option in fields(DSparkConfig):
            value = getattr(config, option.name)
            if option.name not in served and value != option.default:
                raise ConfigError(
                    f"{flag_name(option.name)}={value} belongs to our own worker, and {flag_name('engine')} scheduled "
                    "takes SGLang's; drop one of them"
                )
        if args.enable_return_routed_experts:
            raise ConfigError(
                "--enable-return-routed-experts needs our own worker: SGLang's hands on no experts of decode steps, "
                "and answers would have those of other tokens; drop it"
            )
        if os.environ.get(MODE, _ALIKE) not in (_ALIKE, _BY_REQUEST):
            raise ConfigError(
                f"{MODE}={os.environ[MODE]} asks for another verification than {flag_name('engine')} scheduled; unset "
                f"it, or set it to {_BY_REQUEST} or {_ALIKE}"
            )
        # SGLang would read them in forms of its own.
        for name in ("sps_table_path", "confidence_sts_path"):
            setattr(args, flag_dest(name), None)

    def settled(self, args: ServerArgs) -> ScheduledServer:
        """Return the server with how much a step verifies, by the arguments that SGLang has resolved.

        Raises:
            ConfigError: the worker would verify wrongly, or has no confidence head for an option.
        """
        asked = os.environ.get(MODE)
        why = f"{MODE}={asked}" if asked == _ALIKE else why_one_length(args)
        if asked == _BY_REQUEST and why is not None:
            raise ConfigError(f"{MODE}={asked} is not served: {why}; unset it")
        by_request, path = why is None, self.config.confidence_sts_path
        for what, found in _unserved(resolved_view(args), by_request=by_request).items():
            if found:
                raise ConfigError(
                    f"{flag_name('engine')} scheduled does not serve {what}; drop it, or {flag_name('engine')} builtin"
                )
        if not by_request and path is not None:
            raise ConfigError(
                f"{flag_name('confidence_sts_path')}={path} calibrates a confidence head, and all requests of a step "
                f"verify as many drafts without one ({why}); drop the flag"
            )
        how = (
            "each request verifies its own number of drafts"
            if by_request
            else f"all requests verify the same number of drafts ({why})"
        )
        return replace(self, reason=f"{self.reason}; {how}", by_request=by_request)

    def set_mode(self) -> None:
        """Tell SGLang, in the scheduler that is about to make its worker."""
        os.environ[MODE] = _BY_REQUEST if self.by_request else _ALIKE

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


def _unserved(args: ServerArgs, *, by_request: bool) -> dict[str, bool]:
    """Return what the worker would verify wrongly by our schedule, and whether it is asked for.

    For verifications that are alike SGLang keeps some things once, for the graphs of all widths, or hands them from one
    step to the next.
    """
    captured = args.cuda_graph_config.decode.backend != Backend.DISABLED
    return {
        "prefill-decode disaggregation": args.disaggregation_mode != "null",
        "pipeline stages": args.pp_size > 1,
        "several nodes": args.nnodes > 1,
        "attention data parallelism": args.attn_dp_size > 1,
        "two-batch overlap": bool(args.enable_two_batch_overlap),
        "PD multiplexing": bool(args.enable_pdmux),
        "simulated acceptance (SGLANG_SIMULATE_ACC_LEN)": envs.SGLANG_SIMULATE_ACC_LEN.get() > 0,
        "adapters in CUDA graphs": bool(args.enable_lora) and captured and not by_request,
        "SGLANG_DSPARK_DEFER_CONTEXT_KV": envs.SGLANG_DSPARK_DEFER_CONTEXT_KV.get() and not by_request,
        "SGLANG_OPT_DSV41_TARGET_METADATA_EARLY": (
            envs.SGLANG_OPT_DSV41_TARGET_METADATA_EARLY.get() and not by_request
        ),
    }
