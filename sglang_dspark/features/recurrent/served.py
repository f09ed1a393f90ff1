"""Serve targets with recurrent layers in a scheduler."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.engine.verify import PhasedBackend
from sglang_dspark.errors import ConfigError
from sglang_dspark.features.recurrent.layers import CapturedStates, RecurrentBackend


class States(Part):
    """Have states advance by what a step commits, and by nothing else.

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
        phased = runner.attn_backend
        both = phased.prefill_backend
        both.full_attn_backend = PhasedBackend(runner, both.full_attn_backend, phased.decode_backend)
        both.linear_attn_backend = self._backend = RecurrentBackend.beside(both.linear_attn_backend, runner)
        both.attn_backend_list = [both.full_attn_backend, both.linear_attn_backend]
        both.needs_cpu_seq_lens = False
        both.decode_attention_backend_str = phased.decode_attention_backend_str
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
