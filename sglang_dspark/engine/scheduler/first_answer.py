"""The moment from which every hook of the scheduler process has been called."""

from __future__ import annotations

from typing import Any

from sglang_dspark.engine.hook_checks import Moment, check


class FirstAnswer:
    """Waits until a request has ended that was decoded, and then has the hooks looked for, once."""

    def __init__(self) -> None:
        self._watched: Any = None
        self._done = False

    def look(self, reqs: list[Any]) -> None:
        """Call with the requests of every batch, before it runs.

        Raises:
            EngineError: see :func:`sglang_dspark.engine.hook_checks.check`.
        """
        if self._done:
            return
        watched = self._watched
        if watched is None or (watched.finished() and not _was_decoded(watched)):
            self._watched = next((req for req in reqs if not req.finished()), None)
        elif watched.finished():
            check(Moment.ANSWERED)
            self._done, self._watched = True, None


def _was_decoded(req: Any) -> bool:
    return len(req.output_ids) > 1 and req.finished_reason.to_json()["type"] != "abort"
