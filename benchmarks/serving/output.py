"""The files of a sweep, written cell by cell, so that a sweep that was cut short keeps what it measured and goes on."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from serving.client import Reply
from serving.row import COLUMNS, SweepRow
from serving.schedule import Cell, CellKey
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools import provenance

TERMS = (
    *("commit", "changes", "versions", "hardware", "target", "draft", "prompts", "sampling"),
    *("device", "cpu_flags", "num_prompts"),
)
"""Keys of ``provenance.json`` that have to be equal for rows to be comparable."""


class Output:
    """A folder with ``sweep.csv``, ``requests.jsonl`` and ``provenance.json``.

    Args:
        folder: new, or one that holds results of the same terms.
        record: ``provenance.json`` of the sweep that starts now.

    Attributes:
        measured: cells that have a row already.

    Raises:
        ConfigError: the results there were measured under other terms.
    """

    def __init__(self, folder: Path, record: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rows, self._requests, self._story = (
            folder / name for name in ("sweep.csv", "requests.jsonl", "provenance.json")
        )
        self._record = record
        header, *rows = _whole_lines(self._rows) or [",".join(COLUMNS) + "\n"]
        self.measured = {_key(row) for row in csv.DictReader([header, *rows])}
        if self.measured:
            self._go_on(json.loads(self._story.read_text(encoding="utf-8")))
        kept = [line for line in _whole_lines(self._requests) if _key(json.loads(line)) in self.measured]
        self._rows.write_text("".join([header, *rows]), encoding="utf-8")
        self._requests.write_text("".join(kept), encoding="utf-8")
        provenance.write_json(self._story, record)

    def _go_on(self, before: Mapping[str, Any]) -> None:
        if found := differences(before, self._record):
            listed = "\n  ".join(found)
            raise ConfigError(
                f"--output {self._rows.parent} holds results measured under other terms; choose another folder, or "
                f"remove this one\n  {listed}"
            )
        earlier = {key: before[key] for key in ("command", "started", "finished")}
        self._record["configurations"] = before["configurations"] | self._record["configurations"]
        self._record["earlier_runs"] = [*before.get("earlier_runs", []), earlier]

    def write(self, cell: Cell, row: SweepRow, replies: Sequence[Reply]) -> None:
        """Add a round: its replies, with times in seconds since they were asked for, and then its row."""
        start_s = min(reply.sent_s for reply in replies)
        with self._requests.open("a", encoding="utf-8") as file:
            for slot, reply in enumerate(replies):
                record = {
                    "config": cell.configuration.label,
                    "concurrency": cell.users,
                    "round": cell.round,
                    "slot": slot,
                    "prompt_index": reply.prompt_index,
                    "num_tokens": reply.num_tokens,
                    "kept": list(reply.kept),
                    "text": reply.text,
                    "sent_s": round(reply.sent_s - start_s, 5),
                    "chunks_s": [round(chunk_s - reply.sent_s, 5) for chunk_s in reply.chunks_s],
                    "done_s": round(reply.total_s, 5),
                }
                file.write(json.dumps(record) + "\n")
        append_row(self._rows, asdict(row))

    def finish(self) -> None:
        """Note the time at which all was measured."""
        self._record["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        provenance.write_json(self._story, self._record)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to a CSV file; a new file begins with the names of the columns."""
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(row), lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow({name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()})


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return where two provenances differ, one line each.

    Configurations, loads and rounds may be added later, so only configurations that both have are compared.
    """
    pairs = [(key, before.get(key), now.get(key)) for key in TERMS]
    served = before["configurations"], now["configurations"]
    pairs += [(label, served[0][label], served[1][label]) for label in served[0] if label in served[1]]
    return [f"{name}: {str(old)[:160]} there, {str(new)[:160]} now" for name, old, new in pairs if old != new]


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without a last one that was cut short; none if there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _key(record: Mapping[str, Any]) -> CellKey:
    """Return the cell of a row or of a reply."""
    return record["config"], int(record["concurrency"]), int(record["round"])
