"""Says which pairs were measured on which device at which load, and with what result; see docs/support.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paired_ratio import frame_baselines, paired_ratios, ratio_text, summarise
from serving.results import config_name, read_sweep

PASSES = 0.95
"""Least speed of ``auto`` over that of plain SGLang."""
HEADER = ("pair", "device", "users", "auto / plain", "texts", "date", "release", "verdict", "files")


@dataclass(frozen=True)
class Entry:
    """A pair on a device.

    Attributes:
        sweep: folder of its sweep in ``results/``; None if it was not run.
        identity: files of ``identity.py`` there, with the same release.
    """

    pair: str
    device: str
    sweep: str | None = None
    identity: tuple[str, ...] = ()


ENTRIES = (
    Entry("SmolLM2-135M, bundled drafter", "2 CPU cores", "sweep", ("identity.json", "identity_bfloat16.json")),
    Entry("SmolLM2-135M, bundled drafter", "H200", "h200/sweep"),
    Entry("Qwen3-8B's shape, answers of 32 to 224 tokens", "H200", "h200/qwen3_8b_shape/apart"),
    Entry("Qwen3-8B's shape, answers of 128 tokens", "H200", "h200/qwen3_8b_shape/equal"),
    Entry("Qwen3-8B's shape, prompts of 4000 tokens", "H200", "h200/qwen3_8b_shape/long"),
    Entry("Qwen3-8B, Qwen3-4B, MiniCPM5-2B, Qwen3.8-27B with published drafters", "H100, H200"),
)


def verdict(ratio: float, identity: bool | None) -> str:
    """Return ``pass``, ``warn`` or ``fail``.

    Args:
        ratio: throughput of ``auto`` over that of plain SGLang.
        identity: whether every text was the target's own or split where the target does; None if it was not looked at.
    """
    if ratio < PASSES or identity is False:
        return "fail"
    return "pass" if identity else "warn"


def rows(results: Path) -> Iterator[list[str]]:
    """Yield the matrix, a row per pair, device and load; links are relative to the folder of results."""
    for entry in ENTRIES:
        if entry.sweep is None:
            yield [entry.pair, entry.device, *["-"] * 5, "not run", ""]
        else:
            yield from _measured(results, entry, entry.sweep)


def _measured(results: Path, entry: Entry, folder: str) -> Iterator[list[str]]:
    frame = read_sweep(results / folder / "sweep.csv")
    frame = frame[[config_name(frame, label) in ("plain", "auto") for label in frame["config"]]]
    record = _content(results / folder / "provenance.json")
    identity = _identity(results, entry.identity)
    release = f"{record['versions']['sglang-dspark']} on SGLang {record['versions']['sglang']}"
    files = ", ".join(f"[{Path(file).name}]({file})" for file in (f"{folder}/provenance.json", *entry.identity))
    texts = {None: "not compared", True: "same", False: "differ"}[identity]
    told = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame)))
    for row in told.itertuples():
        users = str(row.load).split()[0]
        cells = (entry.pair, entry.device, users, ratio_text(row), texts, record["started"][:10], release)
        yield [*cells, verdict(row.ratio, identity), files]


def _identity(results: Path, files: tuple[str, ...]) -> bool | None:
    """Return whether all comparisons passed; None without any."""
    scenarios = [scenario for file in files for scenario in _content(results / file)["scenarios"]]
    return all(scenario["passed"] for scenario in scenarios) if scenarios else None


def _content(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
