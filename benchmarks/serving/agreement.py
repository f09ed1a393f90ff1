"""Compare the greedy texts of a sweep's configurations: in float32 they have to be identical."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from serving.configurations import choose_baselines
from serving.results import with_loads
from sglang_dspark.files import lines_of


def identical_texts(log: Path, sweep: pd.DataFrame) -> list[dict[str, Any]]:
    """Count the texts of every configuration and load that are those of its baseline at the same load.

    The baseline itself is compared with its own texts at the first load: in 16 bits the shape of a batch alone moves
    logits, so its share is what a configuration without any error may be expected to reach. Texts are paired by prompt
    and by how often it was asked before: rounds of unequal loads differ in their prompts.

    Args:
        log: ``requests.jsonl``.
        sweep: rows of ``sweep.csv``, which tell the baselines.

    Returns:
        ``config, load, baseline, baseline_load, compared, identical`` of each pair that has texts in common.
    """
    served = sweep[["config", "policy", "dtype"]].drop_duplicates()
    baselines = choose_baselines(list(served.itertuples(index=False, name=None)))
    answers = [json.loads(line) for line in lines_of(log.read_text(encoding="utf-8"))]
    frame = with_loads(pd.DataFrame(answers)).sort_values(["round", "slot"], kind="stable")
    frame["times_asked"] = frame.groupby(["config", "load", "prompt_index"]).cumcount()
    first, cells = frame["load"].iloc[0], dict(iter(frame.groupby(["config", "load"], sort=False)))
    found = []
    for (config, load), cell in cells.items():
        baseline = baselines[config]
        other = (baseline, first if baseline == config else load)
        if other == (config, load) or other not in cells:
            continue
        pairs = cell.merge(cells[other], on=["prompt_index", "times_asked"], suffixes=("", "_expected"))
        if len(pairs):
            counts = {"compared": len(pairs), "identical": int((pairs["text"] == pairs["text_expected"]).sum())}
            found.append({"config": config, "load": load, "baseline": baseline, "baseline_load": other[1], **counts})
    return found
