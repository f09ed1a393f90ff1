"""Has SGLang's own worker, as it comes, keep the drafts that ours would keep under simulated acceptance.

SGLang's own simulation keeps as many drafts of every request of a step, so that requests end together, which real ones
do not. With ``SGLANG_DSPARK_SIMULATE_ACCEPTANCE`` both workers draw from the same numbers, and take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from dspark_kernels import simulated_accept
from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.config import ENV_PREFIX, DSparkConfig
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.server import variables_of_sglang
from sglang_dspark.engine.sglang_types import ScheduleBatch
from sglang_dspark.engine.worker_base import SimulatedAcceptance
from sglang_dspark.errors import ConfigError

if TYPE_CHECKING:
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2

_ATTRIBUTE = "dspark_simulated"
_step: dict[str, Any] = {}
"""The draws of the step under way and the rows of its requests, for a function that is told neither."""


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2.init_cuda_graphs",
    HookType.AFTER,
    where="simulated",
    reason="both workers shall keep the same drafts where their times are compared",
)
def start(result: None, worker: DSparkWorkerV2) -> None:
    """Make the draws of a worker that is ready to serve.

    Raises:
        ConfigError: the text would be spoilt, or the worker accepts where the draws do not reach.
    """
    rates = DSparkConfig.resolve({}, foreign=variables_of_sglang(ENV_PREFIX)).acceptance_profile(worker.gamma)
    assert rates is not None, "these hooks are installed where acceptance is simulated"
    for what, found in {
        "--load-format dummy, since the text has no meaning": worker.server_args.load_format == "dummy",
        "SGLANG_RAGGED_VERIFY_MODE=static": worker._verify_planner.mode_value == "static",
        "SGLANG_SIMULATE_ACC_LEN unset": envs.SGLANG_SIMULATE_ACC_LEN.get() <= 0,
        "a verification that accepts outside of its graph": worker._verify_epilogue is None,
    }.items():
        if not found:
            raise ConfigError(f"{ENV_PREFIX}SIMULATE_ACCEPTANCE={rates[0]},... needs {what}; unset it, or start so")
    setattr(worker, _ATTRIBUTE, SimulatedAcceptance(rates, worker.model_runner))


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
    HookType.BEFORE,
    where="simulated",
    reason="which drafts are kept follows from the prompt",
)
def before_prefill(worker: DSparkWorkerV2, batch: ScheduleBatch, *args: object, **kwargs: object) -> None:
    """Note the keys of requests."""
    if not batch.forward_mode.is_idle():
        getattr(worker, _ATTRIBUTE).prefill_comes(batch)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2._forward_decode",
    HookType.BEFORE,
    where="simulated",
    reason="acceptance is not told whose drafts it judges",
)
def before_decode(worker: DSparkWorkerV2, batch: ScheduleBatch, *args: object, **kwargs: object) -> None:
    """Note whose drafts are judged next."""
    _step.update(draws=getattr(worker, _ATTRIBUTE).draws, rows=batch.req_pool_indices)


@hook(
    "sglang.srt.speculative.dspark_components.dspark_verify.build_accept_outs",
    HookType.AROUND,
    where="simulated",
    reason="SGLang's own simulation keeps as many drafts of every request",
)
def accept(
    original: Callable[..., Any],
    *,
    correct_len: torch.Tensor,
    prefix_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    bonus: torch.Tensor,
    **given: Any,
) -> Any:
    """Keep drafts by the draws, behind the token that SGLang's acceptance has drawn."""
    kept = simulated_accept(_step["draws"], _step["rows"], prefix_lens, draft_tokens, bonus)
    return original(
        correct_len=kept.accept_lens.to(correct_len.dtype),
        prefix_lens=prefix_lens,
        draft_tokens=draft_tokens,
        bonus=bonus,
        **given,
    )
