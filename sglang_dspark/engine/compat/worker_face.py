"""Answer what schedulers ask of a speculative worker beyond the Spec V2 interface itself."""

from types import SimpleNamespace
from typing import Any

from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_dspark.engine.sglang_types import TpModelWorker


class WorkerFace(BaseSpecWorker):
    """``BaseSpecWorker`` of an algorithm whose drafter SGLang does not know.

    It has no graphs or weights that SGLang's features for draft models (weight updates, sizes in the log) could work
    with. Its K/V it shows where prefixes move to host memory.
    """

    draft_pool: KVCache | None = None  # see ``Worker`` in feature.py
    _draft_worker = None  # the base class takes it for a drafter without a model

    def __init__(self, target_worker: TpModelWorker) -> None:
        self._target_worker = target_worker
        super().__init__()

    def __getattr__(self, name: str) -> Any:
        # The scheduler treats its model worker like the target's: anything not ours is the target's.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    def _draft_model_runners(self) -> tuple[SimpleNamespace, ...]:
        # The base class plans by their K/V pools what moves to host memory beside the target's.
        return () if self.draft_pool is None else (SimpleNamespace(token_to_kv_pool=self.draft_pool),)
