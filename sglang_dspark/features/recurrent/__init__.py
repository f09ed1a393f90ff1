"""Targets whose layers keep a recurrent state: verifications leave it alone, commits run the accepted rows again.

This module decides how states are cached, and refuses what is not served; ``layers.py`` has the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, model_config_of, resolving_view
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils import cpu_has_amx_support

from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.engine.feature import Check, Feature, FlagRule, LaunchContext, Stage
from sglang_dspark.engine.flags import MIN_REQUESTS, limit_to
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.server import DSparkServer, attached
from sglang_dspark.engine.sglang_types import ModelRunner, ServerArgs
from sglang_dspark.engine.verify import phased
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.recurrent.layers import CapturedStates, RecurrentBackend


def packed_layers(context: LaunchContext) -> str | None:
    """Refuse such targets on a CPU whose kernels keep the layers before the recurrent ones in another layout."""
    family, found = context.family, context.args.device
    if not family.recurrent or found != "cpu" or not cpu_has_amx_support():
        return None
    return (
        f"--model-path: target architecture {family.architecture} is not served with DSPARK on {found}: its layers "
        "keep recurrent states, and SGLang's kernels for this CPU pack the convolutions before them for AMX; install "
        "the published sglang-kernel in their place, and run sglang-dspark enable-cpu"
    )


def snapshots(context: LaunchContext) -> str | None:
    """Refuse snapshots of states that follow each other too closely."""
    args, least = context.args, 2 * context.server.window
    if not context.family.recurrent or args.mamba_radix_cache_strategy != "extra_buffer":
        return None
    # Under overlap two steps may pass before SGLang takes the state that the first of them has left.
    if args.mamba_track_interval >= least:
        return None
    return (
        f"DSPARK cannot run with --mamba-track-interval={args.mamba_track_interval} and a target with recurrent "
        f"layers; pass {least} or more"
    )


CHECKS = (
    Check("recurrent layers", Stage.MODELS, packed_layers, unserved=True),
    Check("snapshots of states", Stage.FLAGS, snapshots),
)


def keeps_states(architectures: Sequence[str]) -> bool:
    """Return whether targets of these classes are served and have such layers."""
    return any(family.recurrent and family.architecture in architectures for family in FAMILIES)


@hook(
    "sglang.srt.arg_groups.model_hook.handle_mamba_radix_cache",
    HookType.AROUND,
    where="resolution",
    reason="for targets with recurrent layers SGLang chooses snapshots of states, and then finds that a CPU has none",
    by=Moment.SOME_TIME,
)
def resolve_states(original: Callable[..., None], args: ServerArgs, hf_config: Any) -> None:
    """Resolve how states are cached; on a CPU with DSPARK as SGLang can there, which asks for a limit of requests too.

    Raises:
        ConfigError: the operator asks for what it cannot.
    """
    ours = isinstance(attached(args), DSparkServer) and keeps_states(hf_config.architectures)
    if ours and resolving_view(args).device == "cpu":
        leave_snapshots_out(args)
        if args.max_running_requests is None:
            limit_to(args, MIN_REQUESTS)
    original(args, hf_config)


def leave_snapshots_out(args: ServerArgs) -> None:
    """Keep states without the snapshots that SGLang would choose, and so without overlap.

    Raises:
        ConfigError: the operator asks for snapshots.
    """
    strategy = args.mamba_radix_cache_strategy
    if strategy not in ("auto", "no_buffer"):
        raise ConfigError(
            f"DSPARK cannot run with --mamba-radix-cache-strategy={strategy} on cpu: SGLang's snapshots of recurrent "
            "states need a GPU; drop the flag"
        )
    declare_resolution(args, "dspark", mamba_radix_cache_strategy="no_buffer", disable_overlap_schedule=True)


class States(Part):
    """Have states advance over what a step commits, and over nothing else.

    Args:
        worker: ours.
    """

    def __init__(self, worker: Worker) -> None:
        self._runner = worker.model_runner
        self._backend: RecurrentBackend | None = None

    def attention_made(self) -> None:
        """Verify in both kinds of layers. Models expect SGLang's backend for both around those of each.

        Raises:
            ConfigError: there are too few states for the requests that the operator asks for.
        """
        runner = self._runner
        ours, both = runner.attn_backend.decode_backend, runner.attn_backend.prefill_backend
        both.full_attn_backend = phased(runner, both.full_attn_backend, ours)
        both.linear_attn_backend = self._backend = RecurrentBackend.of(both.linear_attn_backend, runner)
        both.attn_backend_list = [both.full_attn_backend, both.linear_attn_backend]
        both.needs_cpu_seq_lens = False
        both.decode_attention_backend_str = ours.decode_attention_backend_str
        runner.attn_backend = both
        runner.kv_index_translator.bind_and_verify_backends([both])
        check_room(self._backend, runner)

    def captured(self, requests: int, rows: int) -> CapturedStates:
        assert self._backend is not None, "steps are captured when attention has been made"
        return CapturedStates(self._backend, requests, rows)


def check_room(backend: RecurrentBackend, runner: ModelRunner) -> None:
    """Refuse to serve fewer requests at a time than an operator has asked for, where states are what is short.

    Args:
        runner: the target's ``ModelRunner``, whose pools exist.

    Raises:
        ConfigError: with the number that fits, and the flags that make room.
    """
    asked, fit = runner.server_args.max_running_requests, runner.max_running_requests
    if asked is None or fit >= min(asked, runner.token_to_kv_pool.size // 2):
        return
    raise ConfigError(
        f"--max-running-requests={asked}: there is room for {backend.num_states} recurrent states of "
        f"{backend.state_mb:.2f} MB, which {fit} requests at a time and the prefix cache need; pass "
        f"--max-running-requests {fit} or less, or make room with --mamba-full-memory-ratio, --max-mamba-cache-size or "
        "--mamba-ssm-dtype bfloat16"
    )


@hook(
    "sglang.srt.mem_cache.kv_cache_configurator._pd_prefill_skips_mamba_spec_state",
    HookType.REPLACE,
    where="scheduler",
    reason="for targets with recurrent layers SGLang keeps the state after every draft, gigabytes for some requests; "
    "DSPARK runs the accepted rows again instead",
    by=Moment.SOME_TIME,
)
def no_state_snapshots() -> bool:
    """Leave out the pool of states that belong to drafts, as a server does that only encodes prompts."""
    return True


def recurrence(runner: ModelRunner) -> dict[str, str | None]:
    """Return the capability ``recurrence`` of a target: SGLang's name of it, such as GDN or KDA; None without one.

    Args:
        runner: SGLang's, of a target that either worker serves.
    """
    backend = getattr(runner.attn_backend, "linear_attn_backend", None)
    backend = getattr(backend, "prompts", backend)
    return {"recurrence": None if backend is None else type(backend).__name__.removesuffix("AttnBackend")}


_REFUSED = {"enable_lora": (None, False), "lora_paths": (None, []), "enable_streaming_session": (False,)}


def _keeps_states(context: LaunchContext) -> bool:
    return keeps_states(context.target.hf_config.architectures)


def _adjusted(name: str, served: tuple[object, ...], reason: str) -> FlagRule:
    return FlagRule(name, served, f"with recurrent layers {reason}", adjusts=True, applies=_keeps_states)


FEATURE = Feature(
    __name__,
    is_used=lambda args: keeps_states(model_config_of(args).hf_config.architectures),
    flag_rules=(
        *(
            FlagRule(name, served, "drop the flag: it is not served with recurrent layers", applies=_keeps_states)
            for name, served in _REFUSED.items()
        ),
        _adjusted("enable_hierarchical_cache", (False,), "DSPARK keeps no states in host memory"),
        _adjusted("strip_thinking_cache", (False,), "a cached prompt would get the state after the answer"),
        *(
            _adjusted(f"enable_{name}", (False,), "DSPARK keeps states in a form of its own")
            for name in (
                "int8_mamba_checkpoint",
                "linear_replayssm",
                "linear_replayssm_spec",
                "mamba_cache_stochastic_rounding",
            )
        ),
        _adjusted("linear_attn_backend", ("triton",), "DSPARK reads only the states of SGLang's Triton kernels"),
        _adjusted(
            "linear_attn_prefill_backend", ("triton", None), "DSPARK reads only the states of SGLang's Triton kernels"
        ),
        _adjusted(
            "mamba_radix_cache_strategy",
            ("extra_buffer", "no_buffer", "auto"),
            "DSPARK does not delay snapshots of states",
        ),
    ),
    checks=CHECKS,
    part=States,
    describe_target=recurrence,
)
