"""Targets whose layers keep a recurrent state: verifications leave it alone, commits run the accepted rows again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import model_config_of

from sglang_dspark.engine.feature import Feature, FlagRule
from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.features.recurrent.checks import CHECKS
from sglang_dspark.features.recurrent.resolution import keeps_states
from sglang_dspark.features.recurrent.served import States

if TYPE_CHECKING:
    from sglang_dspark.engine.feature import LaunchContext


def recurrence(runner: ModelRunner) -> dict[str, str | None]:
    """Return the capability ``recurrence`` of a target: SGLang's name of it, such as GDN or KDA; None without one.

    Args:
        runner: SGLang's, of a target that either worker serves.
    """
    backend = getattr(runner.attn_backend, "linear_attn_backend", None)
    backend = getattr(backend, "prompts", backend)
    return {"recurrence": None if backend is None else type(backend).__name__.removesuffix("AttnBackend")}


_REFUSED = {"enable_lora": (None, False), "lora_paths": (None, []), "enable_streaming_session": (False,)}


def _beside(context: LaunchContext) -> bool:
    return keeps_states(context.target.hf_config.architectures)


def _adjusted(name: str, served: tuple[object, ...], reason: str) -> FlagRule:
    return FlagRule(name, served, f"{reason} of recurrent layers", adjusts=True, beside=_beside)


FEATURE = Feature(
    __name__,
    is_used=lambda args: keeps_states(model_config_of(args).hf_config.architectures),
    flag_rules=(
        *(
            FlagRule(name, served, "drop the flag: it is not served beside recurrent layers", beside=_beside)
            for name, served in _REFUSED.items()
        ),
        _adjusted("enable_hierarchical_cache", (False,), "host memory holds no states"),
        _adjusted("strip_thinking_cache", (False,), "a cached prompt would get the state behind the answer"),
        *(
            _adjusted(f"enable_{name}", (False,), "DSPARK runs accepted rows again from states")
            for name in (
                "int8_mamba_checkpoint",
                "linear_replayssm",
                "linear_replayssm_spec",
                "mamba_cache_stochastic_rounding",
            )
        ),
        _adjusted("linear_attn_backend", ("triton",), "DSPARK knows Triton's states"),
        _adjusted("linear_attn_prefill_backend", ("triton", None), "DSPARK knows Triton's states"),
        _adjusted(
            "mamba_radix_cache_strategy",
            ("extra_buffer", "no_buffer", "auto"),
            "snapshots are taken at once",
        ),
    ),
    checks=CHECKS,
    part=States,
    describe_target=recurrence,
)
