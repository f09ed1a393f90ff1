"""Objects of SGLang's own classes, without a server: arguments, a target's configuration, requests, a start."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

from sglang_dspark.config import DSparkConfig
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine.checks import all_checks
from sglang_dspark.engine.feature import LaunchContext
from sglang_dspark.engine.server import DSparkServer, attach
from sglang_dspark.worker.worker import DSparkWorker

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
OPTIONS = {option.name for option in fields(DSparkConfig)}
_golden_target = cache(lambda: ModelConfig(str(GOLDEN / "target"), dtype="bfloat16"))


def model_config(architecture: str = "Qwen3ForCausalLM", text: Mapping[str, Any] | None = None, **changes: Any) -> Any:
    """The golden target's configuration, of another class, with other keys of its text, and with other attributes."""
    made = deepcopy(_golden_target())
    made.hf_config.architectures = [architecture]
    vars(made.hf_text_config).update(text or {})
    vars(made).update(changes)
    return made


def server_args(target: Any = None, **given: Any) -> ServerArgs:
    """Arguments of a server, unresolved, with this configuration of its target."""
    args = ServerArgs(model_path="target", **given)
    args._model_config = target or model_config()
    return args


def request(
    output_ids: Sequence[int] = (), prompt: Sequence[int] = (0,), rid: str = "r", grammar: Any = None, **parameters: Any
) -> Req:
    """A request of a scheduler, with these sampling parameters, after these tokens of its answer."""
    made = Req(rid, "", array("q", prompt), SamplingParams(**parameters))
    made.output_ids.extend(output_ids)
    made.grammar = grammar
    return made


def partly(cls: type, **attributes: Any) -> Any:
    """An object of a class that takes a server to make, with only these attributes."""
    made = object.__new__(cls)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)  # also of frozen ones, of those with slots, and of modules of torch
    return made


ONE_RANK = partly(GroupCoordinator, world_size=1, rank_in_group=0)


def runner(**attributes: Any) -> Any:
    """A target's runner; its model has no layers unless one is given."""
    return partly(ModelRunner, **{"model": torch.nn.Module(), **attributes})


def worker(**attributes: Any) -> Any:
    """The worker of a target's runner with these attributes."""
    return partly(TpModelWorker, _model_runner=runner(**attributes))


def decoder(loop: Any, **options: Any) -> DSparkWorker:
    """Our worker on a CPU, ready to serve without features, with drafter and target of a :class:`StageLoop`.

    The loop decodes by the worker's schedule and executor from now on.
    """

    class StepDriver(DSparkWorker):
        def load_drafter(self) -> Any:
            return loop.drafter

    args = server_args(device="cpu", dtype="float32", speculative_num_draft_tokens=loop.gamma + 1)
    attach(args, DSparkServer(DSparkConfig(**options), None, dummy_draft=False))
    target = worker(
        device="cpu",
        forward_stream=None,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        model_config=model_config(),
        max_running_requests=8,
        req_to_token_pool=table(8, 256),
    )
    for name, value in {"device": "cpu", "tokenizer": None, "random_seed": 1, "server_args": args}.items():
        setattr(target, name, value)
    with get_parallel().override(tp_group=ONE_RANK, dp_rank=None):
        made = StepDriver(server_args=args, target_worker=target)
        made.parts = made.logits_parts = ()
        made.candidates = None
        made.prepare_to_serve()
    made.eager.forward = loop.eager.forward
    loop.eager, loop.schedule = made.eager, made.schedule
    return made


def batch(*reqs: Any, **attributes: Any) -> Any:
    """A scheduler's batch of these requests."""
    return partly(ScheduleBatch, reqs=list(reqs), **attributes)


def forward(mode: ForwardMode = ForwardMode.TARGET_VERIFY, **attributes: Any) -> Any:
    """The batch of a model's forward."""
    return partly(ForwardBatch, forward_mode=mode, **attributes)


def table(rows: int, columns: int) -> ReqToTokenPool:
    """K/V slots by request, all of them 0, with a row more than asked for."""
    return ReqToTokenPool(rows, columns, "cpu", enable_memory_saver=False)


def launch_context(*, drafter=None, target=None, prefill="fa3", decode="fa3", **given) -> LaunchContext:
    """The start of the golden drafter on a GPU, or of none for ``draft_free``, as checks see it.

    Args:
        target: what :func:`model_config` takes.
        given: options of ours, and arguments of SGLang.
    """
    config = DSparkConfig(**{name: given.pop(name) for name in OPTIONS & given.keys()})
    if drafter is None and not config.draft_free:
        drafter = ResolvedDrafter.read(GOLDEN / "vanilla_g7")
    backends = {"prefill_attention_backend": prefill, "decode_attention_backend": decode}
    found = model_config(**{"head_dim": 128, "context_len": 8192} | (target or {}))
    args = server_args(found, **{"device": "cuda"} | backends | given)
    same_bits = args.enable_deterministic_inference
    return LaunchContext(args, DSparkServer(config, drafter, dummy_draft=False, same_bits=same_bits))


def found_by(name: str, context: LaunchContext) -> str | None:
    """Return the message of the check of this name."""
    [check] = [check for check in all_checks() if check.name == name]
    return check.message(context)
