"""LoRA adapters of the target: requests name them, and each row of a verification gets those of its request.

SGLang's LoRA backends lay a batch out on the host, and assume that every request verifies as many tokens. Here the rows
are ragged and only the device knows how many each request has. All of these backends compute segments of rows, each
with one adapter, so the layout is made of the boundaries between requests, on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from dspark_kernels import to_device
from sglang.srt.lora.backend.base_backend import BaseLoRABackend
from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABatchInfo
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.feature import Check, Feature, FlagRule, LaunchContext, Stage
from sglang_dspark.engine.hooks import Moment, hook
from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.engine.sglang_types import ForwardBatch, ScheduleBatch, ServerArgs
from sglang_dspark.engine.verify import DSparkVerifyInput
from sglang_dspark.errors import UnservedError
from sglang_dspark.step.state import VerifyPlan


def asks_for_adapters(args: ServerArgs) -> bool:
    """Return whether the operator wants adapters."""
    return bool(args.enable_lora or (args.enable_lora is None and args.lora_paths))


def pinned_memory(context: LaunchContext) -> str | None:
    """Refuse adapters on a machine where PyTorch cannot pin memory."""
    args = context.args
    if not asks_for_adapters(args) or args.device != "cpu":
        return None
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:
        asked = "--enable-lora" if args.enable_lora else "--lora-paths"
        return (
            f"DSPARK cannot run with {asked} on this machine: SGLang keeps adapters in pinned memory, which PyTorch "
            "offers only with a GPU; drop the flag"
        )
    return None


@hook(
    "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility",
    HookType.REPLACE,
    where="front_end",
    reason="SGLang refuses LoRA with every speculative algorithm that it does not know by name",
    by=Moment.SOME_TIME,
)
def adapters_fit(args: ServerArgs) -> None:
    """Accept adapters, in place of SGLang's check whether they can run with the algorithm: ours are made above."""


_SEGMENT = 16
"""Rows per segment at most: the smallest tile of SGLang's kernels, which any number of rows fits into."""


HostChoice = tuple[list[int], list[int], list[float]]
"""The lists of an :class:`AdapterChoice`, on the host."""


def choose_adapters(manager: LoRAManager, adapter_ids: Sequence[str | None], slots: int) -> HostChoice:
    """Return where the adapters of a step's requests lie in the pool of loaded ones.

    Args:
        manager: SGLang's ``LoRAManager``.
        adapter_ids: of each request; None for the target as it is.
        slots: of requests; those after the requests have no rows, so any adapter does for them.
    """
    indices = manager.memory_pool.uid_to_buffer_id
    buffers = [indices[adapter_id] for adapter_id in adapter_ids]
    ranks, scalings = [0] * manager.max_loras_per_batch, [0.0] * manager.max_loras_per_batch
    for adapter_id, index in zip(adapter_ids, buffers, strict=True):
        if adapter_id is not None:
            adapter = manager.loras[adapter_id]
            ranks[index], scalings[index] = adapter.config.r, adapter.scaling
    return buffers + [0] * (slots - len(buffers)), ranks, scalings


class AdapterChoice(NamedTuple):
    """The adapter of each request, on the device.

    Attributes:
        buffers: [bs] int32, index of each request's adapter in the pool of loaded ones.
        ranks: [adapters] int32, 0 if nothing is added.
        scalings: [adapters] float32.
    """

    buffers: torch.Tensor
    ranks: torch.Tensor
    scalings: torch.Tensor

    @classmethod
    def of(cls, choice: HostChoice, device: torch.device) -> AdapterChoice:
        """Copy ``choice`` to a device."""
        kinds = torch.int32, torch.int32, torch.float32
        parts = (torch.tensor(part, dtype=kind) for part, kind in zip(choice, kinds, strict=True))
        return cls(*(to_device(part, device) for part in parts))


def segment_bounds(indptr: torch.Tensor, width: int) -> torch.Tensor:
    """Return the bounds of segments that are no longer than SGLang's kernels want them.

    Args:
        indptr: [bs + 1] first row of each request.
        width: the most rows of a request.

    Returns:
        [bs * n + 1] int32 with n = ceil(width / 16): n segments per request, of which the last ones may be empty.
    """
    offsets = torch.arange(0, width, _SEGMENT, device=indptr.device)
    starts = torch.minimum(indptr[:-1, None] + offsets, indptr[1:, None])
    return torch.cat([starts.flatten(), indptr[-1:]]).to(torch.int32)


def lay_out(backend: BaseLoRABackend, choice: AdapterChoice, indptr: torch.Tensor, width: int, rows: int) -> None:
    """Have SGLang's LoRA backend compute the next forward with these adapters. Waits for nothing; may be captured.

    Args:
        backend: SGLang's ``BaseLoRABackend``: ``csgmv`` or ``triton``, or ``torch_native`` on a CPU.
        choice: of the requests of ``indptr``.
        indptr: [bs + 1] first row of each request.
        width: the most rows of a request.
        rows: of the forward, padding included, to which nothing is added.
    """
    bounds = segment_bounds(indptr, width)
    num_segments = len(bounds) - 1
    buffers = choice.buffers[:, None].expand(-1, num_segments // len(choice.buffers)).reshape(-1)
    lengths = bounds.diff()
    backend.reset_batch_state()  # of prompts, whose LM head sees only their last rows, and of stock decode steps
    backend.batch_info = TorchNativeLoRABatchInfo(
        use_cuda_graph=False,  # of SGLang's own: the kernels would take another grid
        bs=num_segments,
        num_segments=num_segments,
        seg_indptr=bounds,
        seg_lens=lengths,
        weight_indices=buffers,
        lora_ranks=choice.ranks,
        scalings=choice.scalings,
        max_len=_SEGMENT,
        # The chunked kernels read rows through one; those of triton would assume rows that were sorted by adapter.
        permutation=torch.arange(rows, dtype=torch.int32, device=indptr.device) if backend.name == "csgmv" else None,
        has_active_lora=True,
        # torch_native reads these, on a CPU only.
        seg_indptr_cpu=bounds,
        seg_lens_cpu=lengths,
        weight_indices_cpu=buffers,
        lora_ranks_cpu=choice.ranks,
        scalings_cpu=choice.scalings,
    )


@hook(
    "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch",
    HookType.AROUND,
    where="scheduler",
    reason="SGLang assumes that a step verifies as many rows for every request, and adds adapters to the wrong ones",
    by=Moment.SOME_TIME,
)
def prepare_verification(original: Callable[..., None], manager: LoRAManager, forward_batch: ForwardBatch) -> None:
    """Lay a verification out instead of SGLang, which does so for other forwards; adapters have been fetched before."""
    layout = forward_batch.spec_info
    if not (forward_batch.forward_mode.is_target_verify() and isinstance(layout, DSparkVerifyInput)):
        original(manager, forward_batch)
        return
    assert layout.indptr is not None, "run_verify fills it"
    chosen = choose_adapters(manager, forward_batch.lora_ids, len(layout.indptr) - 1)
    choice = AdapterChoice.of(chosen, layout.indptr.device)
    lay_out(manager.lora_backend, choice, layout.indptr, layout.draft_token_num, len(forward_batch.input_ids))


class CapturedAdapters:
    """Hold the adapters of captured verifications: replays read what the host has chosen for their step.

    Args:
        manager: SGLang's ``LoRAManager``.
        requests: slots of the largest captured step.
        device: of the target.
    """

    def __init__(self, manager: LoRAManager, requests: int, device: str) -> None:
        self._manager, self._requests, self._device = manager, requests, torch.device(device)
        adapters = manager.max_loras_per_batch
        self._staged: HostChoice = [0] * requests, [0] * adapters, [0.0] * adapters
        self._buffers = AdapterChoice.of(self._staged, self._device)

    def prepare(self, plan: VerifyPlan, forward_batch: ForwardBatch) -> None:
        """Lay out the adapters over the rows of ``plan``, as a part of its captured verification."""
        slots = len(plan.indptr) - 1
        choice = self._buffers._replace(buffers=self._buffers.buffers[:slots])
        lay_out(self._manager.lora_backend, choice, plan.indptr, plan.width, len(plan.input_ids))

    def stage(self, batch: ScheduleBatch | None) -> None:
        """Fetch the adapters of SGLang's batch, which prompts may have displaced, and choose them for the next replay.

        Args:
            batch: None in a step that is measured, whose requests have no adapters.
        """
        adapter_ids = [] if batch is None else [req.lora_id for req in batch.reqs]
        self._manager.fetch_new_loras(set(adapter_ids))
        choice = choose_adapters(self._manager, adapter_ids, self._requests)
        if choice != self._staged:
            for buffer, chosen in zip(self._buffers, AdapterChoice.of(choice, self._device), strict=True):
                buffer.copy_(chosen)
            self._staged = choice


class Adapters(Part):
    """Have captured steps read the adapters of their requests. Eager ones are laid out by a hook.

    Args:
        manager: SGLang's ``LoRAManager``.
        device: of the target.

    Raises:
        UnservedError: the adapters change experts.
    """

    def __init__(self, manager: LoRAManager, device: str) -> None:
        if manager.lora_backend.is_moe_lora:
            raise UnservedError(
                "DSPARK does not serve LoRA adapters of experts; pass --lora-target-modules with only those of "
                "attention (qkv_proj o_proj), or serve without DSPARK"
            )
        self._manager, self._device = manager, device

    @classmethod
    def of(cls, worker: Worker) -> Adapters | None:
        """Return the part of a worker; None if SGLang has loaded no adapters."""
        runner = worker.model_runner
        return None if runner.lora_manager is None else cls(runner.lora_manager, runner.device)

    @property
    def timed(self) -> dict[str, str]:
        manager = self._manager
        modules = ",".join(sorted(manager.target_modules))
        sizes = f"{manager.max_loras_per_batch}:{manager.max_lora_rank}"
        return {"adapters": f"{manager.lora_backend.name}:{sizes}:{modules}"}

    def captured(self, requests: int, rows: int) -> CapturedAdapters:
        return CapturedAdapters(self._manager, requests, self._device)


BACKENDS = {"cuda": ("csgmv", "triton"), "cpu": ("torch_native",)}
"""LoRA backends whose kernels compute ragged rows. On a GPU the torch one would read their numbers on the host."""


def _backend(device: str) -> FlagRule:
    return FlagRule(
        "lora_backend",
        BACKENDS[device],
        f"DSPARK needs a backend whose kernels take another number of rows from each request on {device}",
        adjusts=True,
        applies=lambda context: context.args.device == device and asks_for_adapters(context.args),
    )


FEATURE = Feature(
    __name__,
    is_used=asks_for_adapters,
    flag_rules=(
        FlagRule("enable_lora_overlap_loading", (None, False), "DSPARK serves adapters only without it", adjusts=True),
        *map(_backend, BACKENDS),
    ),
    checks=(Check("memory of adapters", Stage.FLAGS, pinned_memory),),
    part=Adapters.of,
)
