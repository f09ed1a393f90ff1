"""Serve adapters in a scheduler."""

from __future__ import annotations

from sglang.srt.lora.lora_manager import LoRAManager

from sglang_dspark.engine.part import Part, Worker
from sglang_dspark.errors import UnservedError
from sglang_dspark.features.adapters.rows import CapturedAdapters


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
                "DSPARK does not serve LoRA adapters of experts; pass --lora-target-modules with those of attention "
                "alone (qkv_proj o_proj), or serve without DSPARK"
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
