"""``requests.jsonl``: every answer of a sweep with its times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.agreement import Answer
from serving.client import Reply
from serving.schedule import Cell


class RequestLog:
    """Writes ``requests.jsonl`` and keeps the answers for the comparison of texts."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.answers: list[Answer] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, cell: Cell, replies: Sequence[Reply]) -> None:
        """Add the replies of a round; times are written in seconds since the request was sent."""
        for slot, reply in enumerate(replies):
            answer = Answer(
                config=cell.configuration.label,
                concurrency=cell.concurrency,
                round=cell.round,
                slot=slot,
                prompt_index=reply.prompt_index,
                num_tokens=reply.num_tokens,
                text=reply.text,
            )
            self.answers.append(answer)
            chunks_s = [round(chunk_s - reply.sent_s, 5) for chunk_s in reply.chunks_s]
            times = {"chunks_s": chunks_s, "done_s": round(reply.done_s - reply.sent_s, 5)}
            self._file.write(json.dumps({**asdict(answer), **times}) + "\n")
        self._file.flush()
