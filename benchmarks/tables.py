"""Writes the tables of measured figures into the documents, computed from the files in ``benchmarks/results``.

    python benchmarks/tables.py

A table stands between two comments, of which the first one names its function in :data:`TABLES`. Beside the table its
function writes what was measured, and links the file. A test compares the documents with what this script writes.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pandas as pd
from paired_ratio import frame_baselines, paired_ratios, ratio_text, ratios_to_each, summarise
from plot_sweep import prompt_names
from report import figure_text, markdown_table
from serving.results import config_name, over_rounds, read_sweep

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("performance", "support")),
)
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTH = 140


# ---- the committed sweep of the bundled pair


def speeds() -> str:
    """Return the speeds of plain serving, ``off`` and ``auto``, and the ratios between them, by number of users."""
    frame = read_sweep(RESULTS / "sweep" / "sweep.csv")
    told = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame))).set_index(["load", "config"])
    rows = []
    for users, cells in frame.groupby("concurrency"):
        plain, off, auto = (cells[cells["policy"] == policy] for policy in ("plain", "off", "auto"))
        measured = (figure_text(part, "output_tok_s") for part in (plain, off, auto))
        ratios = (ratio_text(told.loc[part["load"].iloc[0], part["config"].iloc[0]]) for part in (off, auto))
        rows.append([str(users), *measured, *ratios, f"{over_rounds(auto, 'accept_length'):.2f}"])
    header = ("users", "plain SGLang", "plugin, `off`", "plugin, `auto`", "off / plain", "auto / off", "accept length")
    return section(header, rows, _origin("Output tokens per second of all users together", frame))


def fixed_lengths() -> str:
    """Return how fast ``auto`` is beside every fixed length, and how many drafts it verifies, by number of users."""
    frame = read_sweep(RESULTS / "sweep" / "sweep.csv")
    (auto,) = frame.loc[frame["policy"] == "auto", "config"].unique()
    told = summarise(ratios_to_each(frame, "output_tok_s", auto)).set_index(["load", "baseline"])
    lengths = sorted(label for label in frame["config"].unique() if label.startswith("static:"))
    rows = []
    for users, cells in frame.groupby("concurrency"):
        beside = (ratio_text(told.loc[cells["load"].iloc[0], label]) for label in lengths)
        drafts = over_rounds(cells[cells["config"] == auto], "mean_verify_len")
        rows.append([str(users), *beside, f"{drafts:.1f}"])
    header = ["users", *(f"`{config_name(frame, label)}`" for label in lengths), "drafts that `auto` verifies"]
    return section(header, rows, _origin("Throughput of `auto` in multiples of each fixed length", frame))


def _origin(what: str, frame: pd.DataFrame) -> str:
    """Return a sentence on what the sweep measured, where, and how often."""
    record, rounds = content_of("sweep/provenance.json"), frame["round"].nunique()
    return (
        f"{what}: {record['target']}, {frame['dtype'].iloc[0]}, {record['hardware']['cpu']}, SGLang "
        f"{record['versions']['sglang']}; prompts of {prompt_names(record)}, "
        f"{round(frame['num_tokens'].sum() / frame['num_requests'].sum())} tokens per answer; medians of {rounds} "
        f"rounds, ratios as geometric means with 95 % intervals ([sweep.csv](sweep/sweep.csv), commit "
        f"{record['commit'][:7]})."
    )


# ---- the policy auto in simulated time


def ablation() -> str:
    """Return what each part of the policy ``auto`` brings: the throughput without it."""
    frame = pd.read_csv(RESULTS / "ablation" / "ablation.csv")
    case = ["machine", "traffic", "load", "seed"]
    whole = frame[frame["without"] == "all parts"].set_index(case)
    frame = frame[frame["without"] != "all parts"].join(whole["tokens_per_s"].rename("whole"), on=case)
    frame["change"] = 100 * (frame["tokens_per_s"] / frame["whole"] - 1)
    by_case = frame.groupby(["without", "machine", "traffic", "load"], sort=False)["change"].agg(["mean", "std"])
    rows = []
    for part, cases in by_case.groupby("without", sort=False):
        common = cases.loc[cases.index.get_level_values("traffic") == "recorded text", "mean"].mean()
        rows.append([str(part), f"{common:+.1f}"])
        for found in (cases["mean"].idxmin(), cases["mean"].idxmax()):
            _, machine, traffic, load = found
            changed = f"{cases.loc[found, 'mean']:+.1f} ± {cases.loc[found, 'std']:.1f}"
            rows[-1] += [changed, f"{traffic}, {machine}, {load}"]
    record = content_of("ablation/provenance.json")[-1]
    recorded = whole.xs("recorded text", level="traffic")
    beside_fixed = recorded.groupby(["machine", "load"])["of_best_fixed"].mean()
    note = (
        "Change of the throughput without a part in percent, mean and standard deviation of "
        f"{frame['seed'].nunique()} seeds: for recorded text in the mean of all machines and loads, and in the cases "
        "that lose and gain most (traffic, machine, requests). With all parts, recorded text is served at "
        f"{beside_fixed.min():.2f} to {beside_fixed.max():.2f} times the speed of the best fixed length in hindsight "
        f"([ablation.csv](ablation/ablation.csv), commit {record['commit'][:7]})."
    )
    return section(("without", "recorded text", "largest loss", "where", "largest gain", "where"), rows, note)


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


# ---- one GPU, or its step times


EQUAL_DRAWS = ("text", "prompt", "users", "plain", "its DSPARK", "`static:7`", "`auto`")
EQUAL_DRAWS += ("`static:7` / its DSPARK", "`auto` / its DSPARK", "the same, whole wall")


def equal_draws(results: Path = RESULTS) -> str:
    """Return the speeds of both workers by the same draws, of the parts ``chat`` and ``long`` of gpu.py."""
    rows, measured = [], {}
    for part, text, prompt in (("chat", "chat", 100), ("long", "mixed", 4000)):
        path = results / "h200" / part / "sweep.csv"
        if not path.exists():
            continue
        frame = read_sweep(path)
        measured[part] = content_of(f"h200/{part}/provenance.json", results)
        for users, cells in frame.groupby("concurrency"):
            speeds = (figure_text(cells[cells["config"] == name], "decode_tok_s") for name in ENGINES)
            told = {metric: _to_builtin(cells, metric) for metric in ("decode_tok_s", "output_tok_s")}
            ratios = [told["decode_tok_s"].get(name, "-") for name in ("static7", "auto")]
            rows.append([text, str(prompt), str(users), *speeds, *ratios, told["output_tok_s"].get("auto", "-")])
    if not rows:
        return "Not measured yet: `make gpu15` does it."
    record = next(iter(measured.values()))
    files = ", ".join(f"[{part}](h200/{part}/sweep.csv)" for part in measured)
    note = (
        "Output tokens per second of all users together, while all of them decode; the last column counts prompts. "
        f"Qwen3-8B's shape with random weights, {record['hardware']['gpu']}, SGLang {record['versions']['sglang']}, "
        f"answers of {record['sampling']['max_tokens']} tokens; medians, ratios as geometric means with the range of "
        f"the rounds ({files}, commit {record['commit'][:7]})."
    )
    return section(EQUAL_DRAWS, rows, note)


ENGINES = ("plain@bfloat16", "builtin", "static7", "auto")


def _to_builtin(cells: pd.DataFrame, metric: str) -> dict[str, str]:
    """Return the ratios of configurations to SGLang's own worker, by label."""
    if cells[cells["config"] == "builtin"][metric].isna().all():
        return {}
    told = summarise(paired_ratios(cells, metric, dict.fromkeys(cells["config"], "builtin")))
    return {row.config: ratio_text(row) for row in told.itertuples()}


def simulated_loads() -> str:
    """Return what the schedule brings by the number of users, in measured step times."""
    frame = pd.read_csv(RESULTS / "h200" / "simulated_loads" / "loads.csv")
    rows = []
    for users, cells in frame.groupby("users"):
        speeds = cells.pivot(index="text", columns="policy", values="output_tok_s")
        ratios = speeds["auto"] / speeds["static:7"]
        rows.append([str(users), *(f"{ratios[text]:.2f}" for text in ("chat", "math"))])
    note = (
        "**Simulated**: throughput of `auto` in multiples of whole blocks, by times of Qwen3-8B's shape on an H200 for "
        "1, 16 and 64 users ([loads.csv](h200/simulated_loads/loads.csv)); at 128, chat is decoded plainly."
    )
    return section(("users", "chat", "mathematics"), rows, note)


def one_budget() -> str:
    """Return what it costs requests that run that prompts are read, in three ways, and gaps beside a long prompt."""
    rows = []
    for text in ("chat", "mathematics"):
        ways = [_simulated_auto(f"{text}_{way}") for way in ("stop", "mixed", "beside")]
        speeds = [way.loc[16, "output_tok_s"] for way in ways]
        ratios = (f"{speed / speeds[0]:.2f}" for speed in speeds[1:])
        rows.append([text, f"{speeds[0]:.0f}", *ratios])
    note = (
        "**Simulated**: tokens of 16 users per second while prompts stop all else, and in multiples of that with a "
        "token for each user beside a prompt, and with drafts ([one_budget](h200/one_budget))."
    )
    speeds_table = section(("text", "prompts stop all else, tok/s", "mixed chunks", "beside drafts"), rows, note)
    gaps = []
    for way, name in (
        ("prompts stop all else", "long_stop"),
        ("beside drafts", "long_beside"),
        ("`--speculative-dspark-max-gap-ms 50`", "long_beside_50"),
        ("`--speculative-dspark-max-gap-ms 25`", "long_beside_25"),
    ):
        auto = _simulated_auto(name)
        cells = (f"{auto.loc[users, f'gap_{part}_ms']:.0f}" for users in (8, 16) for part in ("p99", "max"))
        gaps.append([way, *cells, f"{auto.loc[8, 'ttft_ms']:.0f}"])
    header = ("chat", "8 users: gap, 99 %, ms", "longest", "16 users: 99 %", "longest", "8 users: to the first token")
    return f"{speeds_table}\n\n{section(header, gaps, 'One user more always sends prompts of 32,000 tokens.')}"


def _simulated_auto(name: str) -> pd.DataFrame:
    frame = pd.read_csv(RESULTS / "h200" / "one_budget" / f"{name}.csv")
    return frame[frame["policy"] == "auto"].set_index("users")


def promises() -> str:
    """Return how many promises are kept under ``auto``, by text, share of the mean and number of users."""
    rows = []
    for text in ("chat", "recorded"):
        for file in sorted((RESULTS / "h200" / "promises").glob(f"{text}_*.csv"), reverse=True):
            for point in pd.read_csv(file).itertuples():
                kept = (f"{share:.0%}" for share in (point.kept, point.kept_before))
                others = f"{point.other_tpot_ms / point.other_tpot_before_ms:.2f}"
                rows.append([text, file.stem.partition("_")[2], str(point.users), *kept, f"{point.speed:.2f}", others])
    bounds = [row for row in content_of("h200/promises/bounds.json")["rows"] if row["users"] >= 32]
    least = {part: min(row["share"] for row in bounds if row["users"] == part * row["promised"]) for part in (2, 8)}
    note = (
        "**Simulated**: answers of every second user that kept a promise of so much of the mean time per token, with "
        "the promise and without; tokens of all users, and time per token of the others, beside those without "
        "promises. By brute force ([bounds.json](h200/promises/bounds.json)), half of the users can have "
        f"{least[2]:.2f} of the mean at best if all tokens are to be at least 0.97, and an eighth {least[8]:.2f}."
    )
    return section(("text", "promised", "users", "kept", "before", "all tokens", "others' time"), rows, note)


# ---- which pairs were measured where


@dataclass(frozen=True)
class Measured:
    """A pair on a device.

    Attributes:
        sweep: folder of its sweep in ``results/``; None if it was not run.
        identity: files of ``identity.py`` there, with the same release.
    """

    pair: str
    device: str
    sweep: str | None = None
    identity: tuple[str, ...] = ()


MEASURED = (
    Measured("SmolLM2-135M, bundled drafter", "2 CPU cores", "sweep", ("identity.json", "identity_bfloat16.json")),
    Measured("SmolLM2-135M, bundled drafter", "H200", "h200/sweep"),
    Measured("Qwen3-8B's shape, answers of 32 to 224 tokens", "H200", "h200/qwen3_8b_shape/apart"),
    Measured("Qwen3-8B's shape, answers of 128 tokens", "H200", "h200/qwen3_8b_shape/equal"),
    Measured("Qwen3-8B's shape, prompts of 4000 tokens", "H200", "h200/qwen3_8b_shape/long"),
    Measured("Qwen3-8B, Qwen3-4B, MiniCPM5-2B, Qwen3.8-27B with published drafters", "H100, H200"),
)
SUPPORT = ("pair", "device", "users", "auto / plain", "texts", "date", "plugin, SGLang", "verdict", "files")
PASSES = 0.95
"""Least speed of ``auto`` over that of plain SGLang."""


def verdict(ratios: Sequence[float], identity: bool | None) -> str:
    """Return ``pass``, ``warn`` or ``fail``.

    Args:
        ratios: throughput of ``auto`` over that of plain SGLang, by load.
        identity: whether every text was the target's own or split where the target does; None if it was not looked at.
    """
    if min(ratios) < PASSES or identity is False:
        return "fail"
    return "pass" if identity else "warn"


def support_rows(results: Path = RESULTS) -> Iterator[list[str]]:
    """Yield a row per pair and device; links are relative to the folder of results."""
    for entry in MEASURED:
        if entry.sweep is None:
            yield [entry.pair, entry.device, *["-"] * 5, "not run", ""]
            continue
        frame = read_sweep(results / entry.sweep / "sweep.csv")
        frame = frame[[config_name(frame, label) in ("plain", "auto") for label in frame["config"]]]
        record = content_of(f"{entry.sweep}/provenance.json", results)
        scenarios = [scenario for file in entry.identity for scenario in content_of(file, results)["scenarios"]]
        identity = all(scenario["passed"] for scenario in scenarios) if scenarios else None
        texts = {None: "not compared", True: "same", False: "differ"}[identity]
        release = ", ".join(record["versions"][name] for name in ("sglang-dspark", "sglang"))
        linked = (f"{entry.sweep}/provenance.json", *entry.identity)
        files = ", ".join(f"[{Path(file).name}]({file})" for file in linked)
        told = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame)))
        users, ratios = ", ".join(load.split()[0] for load in told["load"]), [float(ratio) for ratio in told["ratio"]]
        cells = (users, ", ".join(f"{ratio:.2f}" for ratio in ratios), texts, record["started"][:10], release)
        yield [entry.pair, entry.device, *cells, verdict(ratios, identity), files]


# ---- writing


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
    "ablation": ablation,
    "adversarial": adversarial,
    "equal_draws": equal_draws,
    "simulated_loads": simulated_loads,
    "one_budget": one_budget,
    "promises": promises,
    "support": lambda: markdown_table(SUPPORT, list(support_rows())),
}


def written(document: Path) -> str:
    """Return the text of ``document`` with all its tables as the results have them."""

    def renew(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        content = TABLES[name]().replace("](", f"]({os.path.relpath(RESULTS, document.parent)}/")
        return f"{start}\n{content}\n\n{end}"

    return MARKED.sub(renew, document.read_text(encoding="utf-8"))


@click.command(help="Writes the tables of measured figures into the documents.")
def main() -> None:
    """Command line; see the module."""
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
