"""``requests.jsonl``: every answer of a sweep with its times."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from serving.client import Reply
from serving.schedule import Cell, CellKey, Load
from sglang_dspark.files import lines_of


class RequestLog:
    """Write ``requests.jsonl`` cell by cell."""

    def __init__(self, path: Path, measured: Container[CellKey] = ()) -> None:
        """Open the log.

        Args:
            path: the file. Records of cells that are not ``measured`` are dropped: those were cut short.
            measured: cells whose answers an earlier run of the same sweep has written.
        """
        kept = [line for key, line in _read(path) if key in measured]
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(kept)
        self._file.flush()

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


def _read(path: Path) -> Iterator[tuple[CellKey, str]]:
    for line in lines_of(path.read_text(encoding="utf-8")) if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        yield (record["config"], Load(record["concurrency"], record["rate"]), record["round"]), line + "\n"
