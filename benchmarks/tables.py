"""Writes the tables of measured figures into the documents, computed from the files in ``benchmarks/results``.

    python benchmarks/tables.py

A table stands between two comments, of which the first one names its function in :data:`TABLES`. Next to the table its
function writes what was measured, and links the file. A test compares the documents with what this script writes.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import pandas as pd
from paired_ratio import MIN_ROUNDS, frame_baselines, paired_ratios, ratio_text, ratios_to_each, summarise
from report import figure_text, markdown_table, prompt_names
from serving.results import config_name, over_rounds, read_sweep

from sglang_dspark.gpu_paths import GPU_PATHS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "benchmarks" / "README.md", ROOT / "docs" / "performance.md")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTH = 140


# ---- the committed sweeps of the bundled pair


def speeds(sweep: str = "sweep") -> str:
    """Return the speeds of plain serving, ``off`` and ``auto``, and the ratios between them, by number of users.

    Args:
        sweep: folder of the sweep.
    """
    frame = read_sweep(RESULTS / sweep / "sweep.csv")
    told = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame))).set_index(["load", "config"])
    rows = []
    for users, cells in frame.groupby("concurrency"):
        plain, off, auto = (cells[cells["policy"] == policy] for policy in ("plain", "off", "auto"))
        measured = (figure_text(part, "output_tok_s") for part in (plain, off, auto))
        ratios = (ratio_text(told.loc[part["load"].iloc[0], part["config"].iloc[0]]) for part in (off, auto))
        rows.append([str(users), *measured, *ratios, f"{over_rounds(auto, 'accept_length'):.2f}"])
    header = ("users", "plain SGLang", "plugin, `off`", "plugin, `auto`", "off / plain", "auto / off", "accept length")
    return section(header, rows, _origin("the output tokens per second of all users together", frame, sweep))


def fixed_lengths(sweep: str = "sweep") -> str:
    """Return how fast ``auto`` is next to every fixed length, and how many drafts it verifies, by number of users.

    Args:
        sweep: folder of the sweep.
    """
    frame = read_sweep(RESULTS / sweep / "sweep.csv")
    (auto,) = frame.loc[frame["policy"] == "auto", "config"].unique()
    told = summarise(ratios_to_each(frame, "output_tok_s", auto)).set_index(["load", "baseline"])
    lengths = sorted(label for label in frame["config"].unique() if label.startswith("static:"))
    rows = []
    for users, cells in frame.groupby("concurrency"):
        ratios = (ratio_text(told.loc[cells["load"].iloc[0], label]) for label in lengths)
        drafts = over_rounds(cells[cells["config"] == auto], "mean_verify_len")
        rows.append([str(users), *ratios, f"{drafts:.1f}"])
    header = ["users", *(f"`{config_name(frame, label)}`" for label in lengths), "drafts that `auto` verifies"]
    return section(header, rows, _origin("the throughput of `auto` divided by that of each fixed length", frame, sweep))


def _origin(what: str, frame: pd.DataFrame, sweep: str) -> str:
    """Return a sentence on what the sweep measured, where, and how often."""
    record, rounds = content_of(f"{sweep}/provenance.json"), frame["round"].nunique()
    spread = "95 % intervals" if rounds >= MIN_ROUNDS else "their range"
    return (
        f"The table has {what} ([sweep.csv]({sweep}/sweep.csv), commit {record['commit'][:7]}). The target is "
        f"{record['target']} in {frame['dtype'].iloc[0]} on {record['hardware']['cpu']}, with SGLang "
        f"{record['versions']['sglang']}. Prompts are from {prompt_names(record)}, and answers have "
        f"{round(frame['num_tokens'].sum() / frame['num_requests'].sum())} tokens. Speeds are medians of {rounds} "
        f"repetitions, and ratios are geometric means with {spread}."
    )


# ---- the policy auto in simulated time


def adversarial() -> str:
    """Return the cases in which ``auto`` is furthest behind the best fixed length."""
    frame = pd.read_csv(RESULTS / "adversarial" / "adversarial.csv", index_col=0)
    worst = frame.loc[frame.min(axis=1).nsmallest(10).index]
    rows = [[str(case), *(f"{ratio:.2f}" for ratio in ratios)] for case, *ratios in worst.itertuples()]
    note = (
        f"Throughput of `auto` over that of the best fixed length in hindsight: the 10 worst of {len(frame)} cases. "
        "Unless a case says more, it is one answer of 500 steps ([adversarial.csv](adversarial/adversarial.csv), "
        f"commit {content_of('adversarial/provenance.json')['commit'][:7]})."
    )
    return section(("case", *frame.columns), rows, note)


# ---- one GPU


EQUAL_DRAWS = ("text", "prompt", "users", "plain", "its DSPARK", "`static:7`", "`auto`")
EQUAL_DRAWS += ("`static:7` / its DSPARK", "`auto` / its DSPARK", "the same, whole wall")


def equal_draws(results: Path = RESULTS) -> str:
    """Return the speeds of both workers with the same draws, of parts of gpu.py."""
    rows, measured = [], {}
    for part, text, prompt in (("chat", "chat", 100), ("mathematics", "mathematics", 100), ("long", "mixed", 4000)):
        path = results / "h200" / part / "sweep.csv"
        if not path.exists():
            continue
        frame = read_sweep(path)
        measured[part] = content_of(f"h200/{part}/provenance.json", results)
        for users, cells in frame.groupby("concurrency"):
            speeds = (figure_text(cells[cells["config"] == name], "decode_tok_s") for name in ENGINES)
            told = {metric: _ratios_to("builtin", cells, metric) for metric in ("decode_tok_s", "output_tok_s")}
            ratios = [told["decode_tok_s"].get(name, "-") for name in ("static7", "auto")]
            rows.append([text, str(prompt), str(users), *speeds, *ratios, told["output_tok_s"].get("auto", "-")])
    if not rows:
        return "Not measured yet: `make gpu15 QUARTER=chat,long,streams` does it."
    record = next(iter(measured.values()))
    files = ", ".join(f"[{part}](h200/{part}/sweep.csv)" for part in measured)
    note = (
        "Output tokens per second of all users together, while all of them decode; the last column counts prompts. "
        f"Qwen3-8B's shape with random weights, {record['hardware']['gpu']}, SGLang {record['versions']['sglang']}, "
        f"answers of {record['sampling']['max_tokens']} tokens; medians, ratios as geometric means with the range of "
        f"the repetitions ({files}, commit {record['commit'][:7]})."
    )
    return section(EQUAL_DRAWS, rows, note)


ENGINES = ("plain@bfloat16", "builtin", "static7", "auto")


def _ratios_to(label: str, cells: pd.DataFrame, metric: str) -> dict[str, str]:
    """Return the ratios of configurations to one of them, by label."""
    if cells[cells["config"] == label][metric].isna().all():
        return {}
    told = summarise(paired_ratios(cells, metric, dict.fromkeys(cells["config"], label)))
    return {row.config: ratio_text(row) for row in told.itertuples()}


OPEN_PATHS: Mapping[str, tuple[str, str, str, str]] = {
    "prompt-rows": ("prompts", "output_tok_s", "verified", "apart"),
    "mixed-chunks": ("prompts", "output_tok_s", "beside", "verified"),
    "held-rows": ("paths", "decode_tok_s", "held", "off"),
    "survivals": ("paths", "decode_tok_s", "survivals", "static7"),
    "int8": ("paths", "decode_tok_s", "int8", "static7"),
    "scheduled": ("engines", "output_tok_s", "scheduled", "builtin"),
    "memory-graphs": ("engines", "output_tok_s", "saving", "auto"),
    "one-launch-attention": ("long", "decode_tok_s", "static7", "builtin"),
}
"""By path that no GPU has run: the part of gpu.py, the speed, and the configurations with it and without."""


def gpu_paths() -> str:
    """Return what a server does on a GPU, which file shows that, and how it is turned on."""
    rows = []
    for name, path in GPU_PATHS.items():
        shown = f"[{path.shown_by}]({path.shown_by})" if path.shown_by else "**open**"
        named = f"`{path.named_by}`" if path.named_by else ""
        rows.append([f"`{name}`", path.what, shown, named])
    note = (
        "Where a file is named, it shows that a GPU has run the path and was not slower with it. A path marked *open* "
        "is off unless its flag is given, or cannot be turned off. `gpu_paths` in `GET /dspark/capabilities` says "
        "which paths a server takes."
    )
    return section(("path", "on a GPU", "shown by", "turned on by"), rows, note)


def open_paths(results: Path = RESULTS / "h200") -> str:
    """Return what the parts of gpu.py in ``results`` say of open paths, and which defaults would change."""
    rows = []
    for name, (part, metric, one, other) in OPEN_PATHS.items():
        ratios, default, path = "not measured", "", results / part / "sweep.csv"
        if path.exists():
            frame = read_sweep(path)
            cells = frame[frame["config"].isin([one, other])]
            told = summarise(paired_ratios(cells, metric, dict.fromkeys(cells["config"], other)))
            ratios = "; ".join(f"{row.load}: {ratio_text(row)}" for row in told.itertuples()) or "not measured"
            default = "" if told.empty else "on" if bool((told["ratio"] >= 1).all()) else "stays"
        rows.append([f"`{name}`", part, f"`{one}` / `{other}`", ratios, default])
    note = (
        "A default becomes `on` where no load is slower. Ratios are geometric means with their range over the "
        "repetitions."
    )
    return section(("path", "part of `gpu.py`", "ratio of speeds", "by load", "its default"), rows, note)


# ---- writing


def draft_trees() -> str:
    """Return what trees of drafts would bring over chains."""
    report = content_of("trees/trees.json")
    sizes, machines = (13, 21, 25), report["walk_ms"]
    loads = [(name, users) for name in machines for users in report["sets"][0]["throughput"][name] if int(users) <= 8]
    rows = [
        [
            f"{one['prompts']}, {one['temperature']:g}",
            f"{one['chain']:.2f}",
            *(f"{one['over_chain'][str(size)]:.2f}" for size in sizes),
            *(f"{one['throughput'][name][users]['ratio']:.2f}" for name, users in loads),
        ]
        for one in report["sets"]
    ]
    header = ("prompts, temperature", "chain of 5", *(f"tree of {size}" for size in sizes))
    note = (
        "The column *chain of 5* has the accept length of the bundled pair, which drafts five tokens. The columns "
        "*tree* have accept lengths with trees of so many nodes, divided by that of the chain. All other columns have "
        "estimates of the throughput with trees, divided by that with chains, for a machine and a number of users "
        "([trees.json](trees/trees.json))."
    )
    return section([*header, *(f"{name}, {users}" for name, users in loads)], rows, note)


def content_of(file: str, results: Path = RESULTS) -> Any:
    """Return what a JSON file among the results holds."""
    return json.loads((results / file).read_text(encoding="utf-8"))


def section(header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    """Return a table and the note under it."""
    filled = textwrap.fill(note, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{markdown_table(header, rows)}\n\n{filled}"


TABLES: dict[str, Callable[[], str]] = {
    "sweep": speeds,
    "fixed_lengths": fixed_lengths,
    "sweep_float32": partial(speeds, "sweep_float32"),
    "fixed_lengths_float32": partial(fixed_lengths, "sweep_float32"),
    "adversarial": adversarial,
    "equal_draws": equal_draws,
    "gpu_paths": gpu_paths,
    "open_paths": open_paths,
    "draft_trees": draft_trees,
}


def written(document: Path) -> str:
    """Return the text of ``document`` with all its tables as the results have them."""

    def renew(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        content = TABLES[name]().replace("](", f"]({os.path.relpath(RESULTS, document.parent)}/")
        return f"{start}\n{content}\n\n{end}"

    return MARKED.sub(renew, document.read_text(encoding="utf-8"))


@click.command(help="Write the tables of measured figures into the documents.")
def main() -> None:
    """Run the command line; see the module."""
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
