"""Where SGLang asks whether waiting prompts may be encoded now."""

from __future__ import annotations

from typing import Any

from sglang_dspark.engine.compat.arguments import attached


class PromptDelayer:
    """SGLang's ``MinFreeSlotsDelayer`` by another rule. Asked when prompts wait and no chunk of one is under way.

    Args:
        worker: of the server, which knows how long prefills and steps take.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def should_delay(self, *, running_bs: int, num_allocatable_reqs: int) -> bool:
        """Whether the prompts go on waiting while ``running_bs`` requests decode."""
        delay: bool = self._worker.holds_prompts(running_bs)
        return delay


def install(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Hook behind the scheduler's making of its policy: have it ask us, unless the user has chosen SGLang's rule."""
    if attached(scheduler.server_args).holds_prompts:
        scheduler.min_free_slots_delayer = PromptDelayer(scheduler.draft_worker)
