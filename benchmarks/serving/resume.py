"""Going on with an interrupted sweep: what is measured already, and was it measured under the same terms?"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serving.row import COLUMNS
from serving.schedule import CellKey, Load
from sglang_dspark.errors import ConfigError

RESUME, MIX, REPLACE = "resume", "mix", "replace"


def prepare_output(output: Path, record: dict[str, Any], existing: str) -> tuple[set[CellKey], dict[str, Any]]:
    """Decide what becomes of the results that ``output`` holds.

    Args:
        output: folder of the results.
        record: ``provenance.json`` of the sweep that is about to start.
        existing: ``resume`` goes on if the terms are the same, ``mix`` goes on in any case, ``replace`` starts over.

    Returns:
        The cells that have a row already, and ``record`` with what is known of the runs that measured them.

    Raises:
        ConfigError: the results there were measured under other terms, or cannot be continued.
    """
    output.mkdir(parents=True, exist_ok=True)
    rows, story = output / "sweep.csv", output / "provenance.json"
    if existing == REPLACE:
        for path in (rows, output / "requests.jsonl"):
            path.unlink(missing_ok=True)
    if not rows.exists():
        return set(), record
    measured = _measured(rows)
    if not measured:
        return set(), record
    if not story.exists():
        raise ConfigError(f"--output {output} has a sweep.csv without a provenance.json{_REMEDY}")
    before = json.loads(story.read_text(encoding="utf-8"))
    found = differences(before, record)
    if found and existing != MIX:
        listed = "\n  ".join(found)
        raise ConfigError(f"--output {output} holds results measured under other terms{_REMEDY}\n  {listed}")
    earlier = {key: before.get(key) for key in ("command", "started", "finished", "commit", "changes")}
    return measured, {
        **record,
        "configurations": {**before.get("configurations", {}), **record["configurations"]},
        "earlier_runs": [*before.get("earlier_runs", []), {**earlier, "differences": found}],
    }


_REMEDY = (
    "; choose another --output, or pass --existing replace to measure again, or --existing mix to put both in one file"
)

TERMS = (
    *("commit", "changes", "versions", "hardware", "target", "draft", "dflash_draft", "prompts", "sampling", "sla"),
    *("device", "cpu_flags", "num_prompts", "rate_seconds"),
)
"""Keys of ``provenance.json`` that have to be equal for rows to be comparable."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return where two provenances differ, one line each.

    Configurations, loads and rounds may be added later, so only configurations that both have are compared.
    """
    pairs = [(key, before.get(key), now.get(key)) for key in TERMS]
    served = before.get("configurations", {}), now.get("configurations", {})
    pairs += [(label, served[0][label], served[1][label]) for label in served[0] if label in served[1]]
    return [f"{name}: {_short(old)} there, {_short(new)} now" for name, old, new in pairs if old != new]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def _measured(path: Path) -> set[CellKey]:
    """Return the cells with a row. A last line that was cut short is taken out of the file.

    Raises:
        ConfigError: the file has other columns.
    """
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    reader = csv.DictReader(whole.splitlines())
    if whole and tuple(reader.fieldnames or ()) != COLUMNS:
        raise ConfigError(f"{path} has other columns than this version writes; choose another --output")
    return {(row["config"], _load(row), int(row["round"])) for row in reader}


def _load(row: Mapping[str, str]) -> Load:
    return Load(rate=float(row["rate"])) if row["rate"] else Load(concurrency=int(row["concurrency"]))
