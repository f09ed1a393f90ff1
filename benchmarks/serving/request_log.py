"""``requests.jsonl``: every answer of a sweep with its times."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from serving.agreement import Answer
from serving.client import Reply
from serving.load import Load
from serving.schedule import Cell, CellKey
from sglang_dspark.files import lines_of


class RequestLog:
    """Writes ``requests.jsonl`` and keeps the answers for the comparison of texts."""

    def __init__(self, path: Path, measured: Container[CellKey] = ()) -> None:
        """Open the log.

        Args:
            path: the file. Records of cells that are not ``measured`` are dropped: those were cut short.
            measured: cells whose answers an earlier run of the same sweep has written.
        """
        records = _read(path) if path.exists() else []
        kept = [(answer, record) for answer, record in records if _key(answer) in measured]
        self.answers: list[Answer] = [answer for answer, _ in kept]
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(json.dumps(record) + "\n" for _, record in kept)
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
            self.answers.append(_answer(record))
            self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _key(answer: Answer) -> CellKey:
    return answer.config, answer.load, answer.round


def _answer(record: dict[str, Any]) -> Answer:
    load = Load(record["concurrency"], record["rate"])
    names = ("round", "slot", "prompt_index", "num_tokens", "text")
    return Answer(record["config"], load, **{name: record[name] for name in names})


def _read(path: Path) -> list[tuple[Answer, dict[str, Any]]]:
    records = []
    for line in lines_of(path.read_text(encoding="utf-8")):
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        records.append((_answer(record), record))
    return records
