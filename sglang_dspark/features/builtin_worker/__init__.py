"""SGLang's own worker under our schedule, which decides what is verified, and whether anything is drafted.

This module is its start, and what it cannot serve; ``worker.py`` decides and learns, ``step.py`` is one step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Self

from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view, use_mla_backend
from sglang.srt.configs.hybrid_arch import hybrid_kda_config, mambaish_config
from sglang.srt.configs.model_config import is_minimax_sparse
from sglang.srt.environ import envs
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.runtime_context import get_platform
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dspark.config import DSparkConfig, flag_dest, flag_name
from sglang_dspark.declared import truncate
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.server import OtherServer, attached, speculating
from sglang_dspark.engine.sglang_types import ModelConfig, SamplingParams, ServerArgs
from sglang_dspark.errors import ConfigError

MODE = "SGLANG_RAGGED_VERIFY_MODE"
"""Variable that SGLang's own worker reads in its schedulers: whether requests verify different numbers of rows."""
RAGGED_BACKENDS = ("fa3", "fa4", "trtllm_mla", "dsv4")
"""Attention backends that verify ragged rows, of all targets that they serve."""

_BY_REQUEST, _WHOLE = "compact", "static"
_SERVED = set(
    "schedule block_size verify_len confidence_threshold confidence_sts_path online_calibration sps_table_path engine "
    "untested_sglang".split()
)
"""Our options that this worker has a use for."""
_IGNORED = (("min_p", 0.0), ("sampling_seed", None))
"""Parameters of requests that SGLang's own worker ignores, and the values with which it is right to do so."""


@dataclass(frozen=True)
class ScheduledServer(OtherServer):
    """A server that decodes with SGLang's own worker, with our schedule.

    Attributes:
        by_request: whether each request verifies a number of rows of its own; whole blocks are computed otherwise.
        why_whole: why they are.
    """

    by_request: bool = False
    why_whole: str = "SGLang has not resolved its arguments"

    engine: ClassVar[str] = "scheduled"
    takes_candidates: ClassVar[bool] = False

    @property
    def reason(self) -> str:
        how = "each request verifies its own number of drafts"
        if not self.by_request:
            how = f"every request verifies a whole block, of which the policy decides what counts ({self.why_whole})"
        return f"SGLang's own worker decodes with the plugin's policies, as {flag_name('engine')} asks; {how}"

    @property
    def has_confidence_head(self) -> bool:
        return self.by_request  # where it verifies whole blocks it builds none

    def prepare(self, args: ServerArgs) -> None:
        for option in fields(DSparkConfig):
            value = getattr(self.config, option.name)
            if option.name not in _SERVED and value != option.default:
                raise ConfigError(
                    f"{flag_name(option.name)}={value} belongs to the plugin's worker, and {flag_name('engine')} "
                    "scheduled asks for SGLang's own; drop one of them"
                )
        if args.enable_return_routed_experts:
            raise ConfigError(
                "--enable-return-routed-experts needs the plugin's worker: SGLang's own returns no experts of decode "
                f"steps; drop the flag, or pass {flag_name('engine')} plugin if that serves the target"
            )
        for name in ("sps_table_path", "confidence_sts_path"):  # SGLang would read them in forms of its own
            setattr(args, flag_dest(name), None)

    def settled(self, args: ServerArgs) -> Self:
        why = why_whole_blocks(args)
        server = replace(self, by_request=why is None, why_whole=why or "")
        if (asked := os.environ.get(MODE, server.mode)) != server.mode:
            raise ConfigError(f"{MODE}={asked} in the environment does not fit; unset it: {server.reason}")
        for what, found in _unserved(resolved_view(args), whole=why is not None).items():
            if found:
                raise ConfigError(
                    f"{flag_name('engine')} scheduled does not serve {what}; drop that, or pass {flag_name('engine')} "
                    "builtin"
                )
        path = self.config.confidence_sts_path
        if why is not None and path is not None:
            raise ConfigError(
                f"{flag_name('confidence_sts_path')}={path} calibrates a confidence head, which SGLang's own worker "
                f"does not use where it verifies whole blocks ({why}); drop the flag"
            )
        return server

    @property
    def mode(self) -> str:
        """Return the value of :data:`MODE` for the scheduler that is about to make the worker."""
        return _BY_REQUEST if self.by_request else _WHOLE

    def refusals(self, parameters: SamplingParams) -> Iterator[str]:
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


def why_whole_blocks(args: ServerArgs) -> str | None:
    """Return why requests cannot verify different numbers of rows, from resolved arguments; None if they can."""
    return next(_reasons(resolved_view(args), model_config_of(args)), None)


def _reasons(args: ServerArgs, target: ModelConfig) -> Iterator[str]:
    prefill, decode = attention_backends_of(args)
    backend = decode if args.speculative_attention_mode == "decode" else prefill
    takes = "takes the same number of rows of every request"
    ragged = backend in RAGGED_BACKENDS or (backend == "flashinfer" and use_mla_backend(args))
    # Those of trtllm_mha for other GPUs do not.
    if not ragged and not (backend == "trtllm_mha" and get_platform().is_sm100):
        yield f"its attention backend, {backend}, {takes}"
    if args.cuda_graph_config.decode.backend == Backend.DISABLED:
        yield "CUDA graphs of decoding are off, and without them the host would wait for the GPU in every step"
    if mambaish_config(target) is not None and hybrid_kda_config(target) is None:
        yield f"a recurrent layer {takes}"
    if is_minimax_sparse(target.hf_config):
        yield f"its sparse attention {takes}"
    if getattr(target.hf_text_config, "engram_layer_ids", ()):
        yield f"its n-gram embedding {takes}"
    if target.model_is_mrope:
        yield "the target uses M-RoPE"
    if args.enable_lora:
        yield f"an adapter {takes}"
    if not _has_head(args):
        yield "the drafter has no confidence head"


def _has_head(args: ServerArgs) -> bool:
    """Return whether the drafter's configuration has a confidence head; one that says nothing has it, as in SGLang."""
    config = get_config(
        args.speculative_draft_model_path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    return bool(getattr(config, "enable_confidence_head", True))


def _unserved(args: ServerArgs, *, whole: bool) -> dict[str, bool]:
    """Return what the worker would verify wrongly under our schedule, and whether it is asked for.

    With whole blocks, what a step hands to the next one is lost where that drafts nothing.
    """
    return {
        "prefill-decode disaggregation": args.disaggregation_mode != "null",
        "pipeline stages": args.pp_size > 1,
        "several nodes": args.nnodes > 1,
        "attention data parallelism": args.attn_dp_size > 1,
        "two-batch overlap": bool(args.enable_two_batch_overlap),
        "PD multiplexing": bool(args.enable_pdmux),
        "simulated acceptance (SGLANG_SIMULATE_ACC_LEN)": envs.SGLANG_SIMULATE_ACC_LEN.get() > 0,
        **{
            variable.name: whole and variable.get()
            for variable in (envs.SGLANG_DSPARK_DEFER_CONTEXT_KV, envs.SGLANG_OPT_DSV41_TARGET_METADATA_EARLY)
        },
    }


def _decodes(args: ServerArgs) -> bool:
    server = speculating(args)
    return server is not None and server.engine == "scheduled"


FEATURE = Feature(
    __name__,
    is_used=_decodes,
    other_server=ScheduledServer,
)
