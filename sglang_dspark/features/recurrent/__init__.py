"""Targets whose layers keep a recurrent state: verifications leave it alone, commits run the accepted rows again."""

from collections.abc import Sequence

from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.engine.feature import Feature
from sglang_dspark.engine.hook_checks import Moment
from sglang_dspark.engine.launch.hook import Hook
from sglang_dspark.engine.sglang_types import ModelRunner


def keeps_states(architectures: Sequence[str]) -> bool:
    """Return whether targets of these classes are served and have such layers."""
    return any(family.recurrent and family.architecture in architectures for family in FAMILIES)


def recurrence(runner: ModelRunner) -> dict[str, str | None]:
    """Return the capability ``recurrence`` of a target: SGLang's name of it, such as GDN or KDA; None without one.

    Args:
        runner: SGLang's, of a target that either worker serves.
    """
    backend = getattr(runner.attn_backend, "linear_attn_backend", None)
    backend = getattr(backend, "prompts", backend)
    return {"recurrence": None if backend is None else type(backend).__name__.removesuffix("AttnBackend")}


FEATURE = Feature(
    __name__,
    is_used=lambda args: keeps_states(model_config_of(args).hf_config.architectures),
    hooks=(
        Hook(
            "states-on-a-cpu",
            "sglang.srt.arg_groups.model_hook.handle_mamba_radix_cache",
            HookType.AROUND,
            "features.recurrent.resolution.resolve_states",
            "flags",
            "for targets with recurrent layers SGLang chooses snapshots of states, and then finds that a CPU has none",
            Moment.SOME_TIME,
        ),
        Hook(
            "no-state-snapshots",
            "sglang.srt.mem_cache.kv_cache_configurator._pd_prefill_skips_mamba_spec_state",
            HookType.REPLACE,
            "features.recurrent.served.no_state_snapshots",
            "scheduler",
            "for targets with recurrent layers SGLang keeps the state after every draft, gigabytes for some requests; "
            "DSPARK runs the accepted rows again instead",
            Moment.SOME_TIME,
        ),
    ),
    checks="checks.CHECKS",
    part="served.States.of",
    describe_target=recurrence,
)
