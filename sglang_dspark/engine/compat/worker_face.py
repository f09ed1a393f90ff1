"""What schedulers ask of the worker of a speculative algorithm, beyond the Spec V2 interface itself.

They take it that there is a draft worker with runners like the target's. DSPARK's drafter is none: it has no graphs or
weights that SGLang's features for draft models (weight updates, sizes in the log) could work with, and says so. Its K/V
it shows where prefixes move to host memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

_NOTHING: Mapping[str, float] = {}


class WorkerFace(BaseSpecWorker):
    """``BaseSpecWorker`` of an algorithm whose drafter SGLang does not know."""

    draft_pool: Any = None  # the draft K/V as SGLang's kind of pool, where a feature of the server copies it along
    _draft_worker = None  # what the base class would hold

    def __init__(self, target_worker: Any) -> None:
        # BaseSpecWorker.__init__, where there is one, only prepares the figures that are answered below.
        self._target_worker = target_worker

    def __getattr__(self, name: str) -> Any:
        # The scheduler treats its model worker like the target's: anything not ours is the target's.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    @property
    def target_worker(self) -> Any:
        """SGLang's worker of the target."""
        return self._target_worker

    def _draft_model_runners(self) -> tuple[Any, ...]:
        # The base class plans by their K/V pools what moves to host memory beside the target's.
        return () if self.draft_pool is None else (SimpleNamespace(token_to_kv_pool=self.draft_pool),)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """Nothing of the drafter's can be updated in a running server."""
        return []

    @property
    def graph_memory_usage(self) -> Mapping[str, float]:
        """Gigabytes, by phase, of graphs besides the target's that SGLang has captured."""
        return _NOTHING

    @property
    def graph_time_usage(self) -> Mapping[str, float]:
        """Seconds, by phase, that they took."""
        return _NOTHING

    @property
    def weight_load_time(self) -> float:
        """Seconds that SGLang took to load a drafter."""
        return 0.0

    @property
    def preloaded_weights_bytes(self) -> int:
        """Bytes of weights on the device that SGLang has not seen yet when it measures its free memory."""
        return 0
