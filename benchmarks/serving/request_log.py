"""``requests.jsonl``: every answer of a sweep with its times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.client import Reply
from serving.schedule import Cell


class RequestLog:
    """Write ``requests.jsonl`` cell by cell."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, cell: Cell, replies: Sequence[Reply]) -> None:
        """Add the replies of a round; times are written in seconds since the request was sent."""
        start_s = min(reply.sent_s for reply in replies)
        for slot, reply in enumerate(replies):
            record = {
                "config": cell.configuration.label,
                "concurrency": cell.load.concurrency,
                "rate": cell.load.rate,
                "round": cell.round,
                "slot": slot,
                "prompt_index": reply.prompt_index,
                "num_tokens": reply.num_tokens,
                "text": reply.text,
                "sent_s": round(reply.sent_s - start_s, 5),
                "chunks_s": [round(chunk_s - reply.sent_s, 5) for chunk_s in reply.chunks_s],
                "done_s": round(reply.total_s, 5),
            }
            self._file.write(json.dumps(record) + "\n")
        self._file.flush()
