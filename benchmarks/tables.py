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
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import support_matrix
from paired_ratio import MIN_ROUNDS, frame_baselines, paired_ratios, ratio_text, ratios_to_each, summarise
from serving.results import config_name, over_rounds, read_sweep

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DRAFTER = ROOT / "sglang_dspark" / "drafters" / "smollm2-135m-instruct" / "README.md"
DOCS = ROOT / "docs"
DOCUMENTS = (
    ROOT / "README.md",
    DRAFTER,
    ROOT / "benchmarks" / "README.md",
    *(DOCS / f"{name}.md" for name in ("performance", "scheduling", "support")),
)
BESIDE_BUILTIN = ("users", "plain SGLang", "its DSPARK", "`auto`", "auto / plain", "auto / its DSPARK")
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
WIDTH = 140
WHOLE = "all parts"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"| {' | '.join(header)} |", *lines])


def written(document: Path) -> str:
    """Return the text of ``document`` with all its tables as the results have them."""

    def renew(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        content = TABLES[name]().replace("](", f"]({os.path.relpath(RESULTS, document.parent)}/")
        return f"{start}\n{content}\n\n{end}"

    return MARKED.sub(renew, document.read_text(encoding="utf-8"))


def speeds() -> str:
    """Return the speeds of plain serving, ``off`` and ``auto``, and the ratios between them, by number of users."""
    frame = _sweep("sweep")
    pairs = paired_ratios(frame, "output_tok_s", frame_baselines(frame))
    ratios = summarise(pairs.assign(config=[config_name(frame, label) for label in pairs["config"]]))
    rows = []
    for users, cells in frame.groupby("concurrency"):
        by_name = {config_name(frame, str(label)): part for label, part in cells.groupby("config")}
        told = ratios[ratios["load"] == cells["load"].iloc[0]].set_index("config")
        rows.append(
            [
                str(users),
                *(_speed(over_rounds(by_name[name], "output_tok_s")) for name in ("plain", "off", "auto")),
                *(ratio_text(told.loc[name]) for name in ("off", "auto")),
                f"{over_rounds(by_name['auto'], 'accept_length'):.2f}",
            ]
        )
    header = ("users", "plain SGLang", "plugin, `off`", "plugin, `auto`", "off / plain", "auto / off", "accept length")
    what = "Output tokens per second of all users together"
    return _section(header, rows, _origin(what, frame))


def shape() -> str:
    """Return the speeds of Qwen3-8B's shape on an H200: plain, SGLang's own DSPARK, and ``auto``."""
    rows, sources = [], []
    for name in ("equal", "apart", "long"):
        folder = f"h200/qwen3_8b_shape/{name}"
        frame, asked = _sweep(folder), _content(f"{folder}/provenance.json")["sampling"]
        for users, cells, speeds in _beside_builtin(frame, "auto"):
            prompt = round(cells["num_prompt_tokens"].sum() / cells["num_requests"].sum())
            rows.append([str(prompt), _lengths(asked), users, *speeds])
        sources.append(f"[{name}]({folder}/sweep.csv)")
    first = frame.iloc[0]
    note = (
        f"Output tokens per second of all users together: Qwen3-8B's shape with random weights, {first['dtype']}, "
        f"{first['gpu']}, SGLang {_versions(first)['sglang']}; medians of 2 or 3 rounds, ratios as geometric means "
        f"with the range of the rounds ({', '.join(sources)})."
    )
    return _section(("prompt", "answer", *BESIDE_BUILTIN), rows, note)


def bundled_on_gpu() -> str:
    """Return the speeds of the bundled pair on an H200: plain, SGLang's own DSPARK, and ``auto``."""
    folder, others = "h200/sweep", ("scheduled", "tails")
    frame, rows = _sweep(folder), []
    for users, cells, speeds in _beside_builtin(frame, "auto@bfloat16"):
        load = frame[frame["load"] == cells["load"].iloc[0]]
        beside = (_speed(over_rounds(load[load["config"] == name], "output_tok_s")) for name in others)
        rows.append([users, *speeds, *beside])
    header = (*BESIDE_BUILTIN, "`scheduled`", "`auto`, block of 13")
    return _section(header, rows, _origin("Output tokens per second of all users together", frame, folder))


def _beside_builtin(frame: pd.DataFrame, auto: str) -> Iterator[tuple[str, pd.DataFrame, list[str]]]:
    """Yield users, rows and the other cells of ``BESIDE_BUILTIN`` for each load of a sweep."""
    frame = frame[(frame["config"] == auto) | frame["policy"].isin(["plain", "builtin"])]
    told = summarise(ratios_to_each(frame, "output_tok_s", auto))
    told["policy"] = told["baseline"].map(dict(zip(frame["config"], frame["policy"], strict=True)))
    for users, cells in frame.groupby("concurrency"):
        by_policy = {policy: over_rounds(part, "output_tok_s") for policy, part in cells.groupby("policy")}
        beside = told[told["load"] == cells["load"].iloc[0]].set_index("policy")
        speeds = [_speed(by_policy[policy]) for policy in ("plain", "builtin", "auto")]
        yield str(users), cells, [*speeds, *(ratio_text(beside.loc[of]) for of in ("plain", "builtin"))]


def fixed_lengths() -> str:
    """Return how fast ``auto`` is beside every fixed length, and how many drafts it verifies, by number of users."""
    frame = _sweep("sweep")
    (auto,) = frame.loc[frame["policy"] == "auto", "config"].unique()
    ratios = summarise(ratios_to_each(frame, "output_tok_s", auto))
    lengths = sorted(label for label in frame["config"].unique() if label.startswith("static:"))
    rows = []
    for users, cells in frame.groupby("concurrency"):
        told = ratios[ratios["load"] == cells["load"].iloc[0]].set_index("baseline")
        drafts = over_rounds(cells[cells["config"] == auto], "mean_verify_len")
        beside = [ratio_text(told.loc[label]) for label in lengths]
        rows.append([str(users), *beside, f"{drafts:.1f}"])
    header = ["users", *(f"`{config_name(frame, label)}`" for label in lengths), "drafts that `auto` verifies"]
    what = "Throughput of `auto` in multiples of each fixed length"
    return _section(header, rows, _origin(what, frame))


def step_times() -> str:
    """Return the step times that the server of the sweep measured at its start."""
    table = _content("sweep/sps.json")
    depth, key = table["drafts"][-1], table["key"]
    rows = [
        [str(users), *(f"{times[0]:.1f}" for times in (verify[0], draft[-1], *verify[1:]))]
        for users, draft, verify in zip(table["requests"], table["draft_ms"], table["verify_ms"], strict=True)
    ]
    header = ["users", "plain step", f"draft {depth}", *(f"verify {drafts}" for drafts in table["drafts"][1:])]
    note = (
        f"Milliseconds with {table['contexts'][0]} tokens of context, as the server measured them at its start: "
        f"{key['dtype']}, {key['threads']} threads of {key['device']}, SGLang {key['sglang']} "
        "([sps.json](sweep/sps.json))."
    )
    return _section(header, rows, note)


def attention() -> str:
    """Return the time of attention in a layer of a verification, beside FlashAttention 3 and what it was before."""
    content = _content("h200/window_attention.json")
    header = ("requests", "context", "splits", "floor", "`window_attention`", "before", "FlashAttention 3")
    times = ("floor_us", "median_us", "before_us", "flash_attention_3_us")
    rows = [
        [str(case["requests"]), f"{case['context']:,}", str(case["splits"]), *(f"{case[name]:.1f}" for name in times)]
        for case in content["cases"]
    ]
    note = (
        "Microseconds for a layer of 32 heads and 8 K/V heads of 128 in bfloat16, 8 rows per request, on an "
        f"{content['hardware']['gpu']} ([window_attention.json](h200/window_attention.json), which says what was "
        "compared)."
    )
    return _section(header, rows, note)


def kernels() -> str:
    """Return the time of the kernels of a step of many requests, beside the least possible one and the torch form."""
    content, rows = _content("h200/kernels.json"), []
    for case in content["cases"]:
        shape = case["shape"]
        requests = shape["bs"] if "bs" in shape else shape["rows"] / 8
        if requests == 64 and shape.get("V", 151936) == 151936 and shape.get("kept", 0) < shape.get("rows", 1):
            floor = f"{case['floor_us']:.1f}" if case["floor_us"] >= 0.1 else "-"
            rows.append([f"`{case['case']}`", f"{case['median_us']:.1f}", floor, f"{case['reference_us']:,.0f}"])
    note = (
        "Microseconds for 64 requests with blocks of 7 drafts and a vocabulary of 151,936 tokens on an "
        f"{content['hardware']['gpu']}; the floor is the least that memory bandwidth and arithmetic allow "
        f"([kernels.json](h200/kernels.json), commit {content['commit']}, Triton {content['versions']['triton']})."
    )
    return _section(("kernel", "median", "floor", "torch"), rows, note)


def calibration() -> str:
    """Return the calibration error of the bundled drafter's confidences, before and after calibration."""
    rows = []
    for temperature in (0, 1):
        content = _content(f"calibration/sts_t{temperature}.json")
        for kind, key in (("raw head", "before"), ("STS", "after"), ("scale and shift", "shifted")):
            rows.append([str(temperature), kind, *(f"{100 * error:.1f}" for error in content[f"ece_{key}"])])
    header = ("temperature", "calibration", *map(str, range(1, len(rows[0]) - 1)))
    note = (
        "Expected calibration error of the prefix survival in percent, by draft, for the bundled pair on 200 prompts "
        "of GSM8K, HumanEval and MT-Bench that were not fitted ([provenance.json](calibration/provenance.json))."
    )
    return _section(header, rows, note)


def accept_lengths() -> str:
    """Return what the target accepts of the bundled drafter, by prompt set, and of it without its parts."""
    content = _content("h200/accept_length.json")
    sets = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt-bench": "MT-Bench, first turn"}
    found = {
        (result["set"], result["temperature"], result["proposed_tokens"], result["markov"]): result
        for result in content["results"]
    }
    rows = []
    for key, title in sets.items():
        usual = found[key, 0, 12288, True]
        others = [found[key, 0, 12288, False], found[key, 0, 49152, True], found[key, 1, 12288, True]]
        survival = " ".join(f"{share:.3f}".lstrip("0") for share in usual["survival"])
        unlooped = f"{usual['loops']['accept_length_of_other_texts']:.2f}"
        lengths = [f"{result['accept_length']:.2f}" for result in others]
        rows.append([title, f"{usual['accept_length']:.2f}", survival, unlooped, *lengths])
    header = (
        *("prompts", "accept length", "survival by position", "without texts that loop"),
        *("without Markov head", "whole vocabulary", "at temperature 1"),
    )
    note = (
        f"{content['protocol'].capitalize()}, on an {content['gpu']} "
        f"([accept_length.json](h200/accept_length.json), commit {content['commit']})."
    )
    return _section(header, rows, note)


def ablation() -> str:
    """Return what each part of the policy ``auto`` brings: the throughput without it, in simulated time."""
    frame = pd.read_csv(RESULTS / "ablation" / "ablation.csv")
    case = ["machine", "traffic", "load", "seed"]
    whole = frame[frame["without"] == WHOLE].set_index(case)
    frame = frame[frame["without"] != WHOLE].join(whole["tokens_per_s"].rename("whole"), on=case)
    frame["change"] = 100 * (frame["tokens_per_s"] / frame["whole"] - 1)
    by_case = frame.groupby(["without", "machine", "traffic", "load"], sort=False)["change"].agg(["mean", "std"])
    rows = []
    for part, cases in by_case.groupby("without", sort=False):
        common = cases.loc[cases.index.get_level_values("traffic") == "recorded text", "mean"].mean()
        rows.append([str(part), f"{common:+.1f}", *_extreme(cases, "idxmin"), *_extreme(cases, "idxmax")])
    record = _content("ablation/provenance.json")[-1]
    recorded = whole.xs("recorded text", level="traffic")
    beside_fixed = recorded.groupby(["machine", "load"])["of_best_fixed"].mean()
    note = (
        "Change of the throughput without a part in percent, mean and standard deviation of "
        f"{frame['seed'].nunique()} seeds: for recorded text in the mean of all machines and loads, and in the cases "
        "that lose and gain most (traffic, machine, requests). With all parts, recorded text is served at "
        f"{beside_fixed.min():.2f} to {beside_fixed.max():.2f} times the speed of the best fixed length in hindsight "
        f"([ablation.csv](ablation/ablation.csv), commit {record['commit'][:7]})."
    )
    header = ("without", "recorded text", "largest loss", "where", "largest gain", "where")
    return _section(header, rows, note)


def adversarial() -> str:
    """Return the cases in which ``auto`` is furthest behind the best fixed length, in simulated time."""
    frame, before = (pd.read_csv(RESULTS / "adversarial" / f"{name}.csv", index_col=0) for name in ("now", "before"))
    worst = frame.loc[frame.min(axis=1).nsmallest(10).index]
    rows = [
        [str(case), *(f"{ratio:.2f}" for ratio in ratios), f"{before.loc[case].min():.2f}"]
        for case, *ratios in worst.itertuples()
    ]
    note = (
        f"Throughput of `auto` over that of the best fixed length in hindsight: the 10 worst of {len(frame)} cases, "
        "and the worst machine of each before fits came early and step times were checked. Unless a case says more, it "
        "has 2048 tokens for each user ([now.csv](adversarial/now.csv), [before.csv](adversarial/before.csv))."
    )
    return _section(("case", *frame.columns, "before, at worst"), rows, note)


def oracle() -> str:
    """Return what drafts that are always right bring beside those of the bundled drafter."""
    frame = _sweep("oracle")
    told = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame))).set_index(["load", "config"])
    rows = []
    for users, cells in frame.groupby("concurrency"):
        by_policy = dict(iter(cells.groupby("policy")))
        drafted = [by_policy[policy] for policy in ("auto", "oracle")]
        ratios = [ratio_text(told.loc[(part["load"].iloc[0], part["config"].iloc[0])]) for part in drafted]
        lengths = [f"{over_rounds(part, 'accept_length'):.2f}" for part in drafted]
        rows.append([str(users), _speed(over_rounds(by_policy["plain"], "output_tok_s")), *ratios, *lengths])
    header = ("users", "plain SGLang", "auto / plain", "oracle / plain", "accept length, auto", "oracle")
    return _section(header, rows, _origin("Output tokens per second of all users together", frame, "oracle"))


def draft_windows() -> str:
    """Return what a window on the context does to the bundled drafter, by the context's length."""
    frame = pd.read_csv(RESULTS / "draft_windows" / "draft_windows.csv")
    told = _content("draft_windows/provenance.json")
    whole = frame["config"].iloc[0]
    speed = summarise(paired_ratios(frame, "tok_s", dict.fromkeys(frame["config"], whole)))
    rows = []
    for (context, config), cells in frame.groupby(["load", "config"], sort=False):
        ratio = speed[(speed["load"] == context) & (speed["config"] == config)]
        means = (f"{1 / (1 / cells['accept_length']).mean():.2f}", f"{cells['step_ms'].mean():.1f}")
        rows.append([f"{context:,}", config, *means, "" if ratio.empty else ratio_text(ratio.iloc[0])])
    note = (
        f"The bundled pair, `auto`, 1 user, {told['dtype']}, {told['hardware']['cpu']}; "
        f"{frame['round'].nunique()} questions behind one document of texts of {', '.join(told['prompts'])}, "
        f"{told['max_tokens']} tokens per answer, timed from the first one on "
        f"([draft_windows.csv](draft_windows/draft_windows.csv), commit {told['commit'][:7]})."
    )
    return _section(("context", "drafter sees", "accept length", "step, ms", "speed, of whole context"), rows, note)


def support() -> str:
    """Return the support matrix."""
    return markdown_table(support_matrix.HEADER, list(support_matrix.rows(RESULTS)))


def published() -> str:
    """Return where ``auto`` would have been in other engines' tables."""
    content = _content("published.json")
    frame = pd.DataFrame(content["rows"])
    rows = []
    for (source, users), cases in frame.groupby(["source", "users"], sort=False):
        knows, mean = (cases[cases["head"] == head].iloc[0] for head in ("each draft", "the mean alone"))
        plain = "-" if pd.isna(knows["published_plain"]) else f"{knows['published_plain']:,.0f}"
        told = [f"{knows[f'published_{name}']:,.0f}" for name in ("fixed", "adaptive")]
        published = knows["published_adaptive"] / np.nanmax([knows["published_fixed"], knows["published_plain"]])
        ours = [f"{case['auto'] / max(case['fixed'], case['plain']):.2f}" for case in (knows, mean)]
        rows.append([str(source), str(users), plain, *told, f"{published:.2f}", *ours, f"{knows['verified']:.1f}"])
    header = ("table", "users", "plain", "fixed", "adaptive", "its gain", "ours", "ours, mean alone", "drafts of ours")
    note = (
        "Plain, fixed and adaptive: published tokens per second. Gains are over the better of plain and fixed; ours: "
        f"`auto` in the simulation, answers of {content['answer_tokens']} tokens, with a confidence head that knows "
        "each draft's acceptance, or the mean alone ([published.json](published.json))."
    )
    return _section(header, rows, note)


TABLES: dict[str, Callable[[], str]] = {
    "sweep": speeds,
    "h200_shape": shape,
    "h200_pair": bundled_on_gpu,
    "attention": attention,
    "fixed_lengths": fixed_lengths,
    "step_times": step_times,
    "kernels": kernels,
    "calibration": calibration,
    "accept_lengths": accept_lengths,
    "ablation": ablation,
    "adversarial": adversarial,
    "published": published,
    "support": support,
    "oracle": oracle,
    "draft_windows": draft_windows,
}


def _sweep(folder: str) -> pd.DataFrame:
    frame = read_sweep(RESULTS / folder / "sweep.csv")
    return frame[frame["concurrency"].notna()]


def _content(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return content


def _extreme(cases: pd.DataFrame, which: str) -> tuple[str, str]:
    """Return the change of one case, and the case."""
    found = getattr(cases["mean"], which)()
    _, machine, traffic, load = found
    return f"{cases.loc[found, 'mean']:+.1f} ± {cases.loc[found, 'std']:.1f}", f"{traffic}, {machine}, {load}"


def _origin(what: str, frame: pd.DataFrame, folder: str = "sweep") -> str:
    """Return a sentence on what a sweep of the bundled pair measured, where, and how often."""
    first, rounds = frame.iloc[0], frame["round"].nunique()
    versions = _versions(first)
    hardware = first["gpu"] if isinstance(first["gpu"], str) else first["cpu"]
    spread = "95 % intervals" if rounds >= MIN_ROUNDS else "the range of the rounds"
    commits = ", ".join(sorted({str(commit)[:7] for commit in frame["commit"]}))
    return (
        f"{what}: {first['model']}, {first['dtype']}, {hardware}, SGLang {versions['sglang']}; prompts of "
        f"{first['prompt_set'].replace('+', ', ')}, {round(frame['num_tokens'].sum() / frame['num_requests'].sum())} "
        f"tokens per answer; medians of {rounds} rounds, ratios as geometric means with {spread} "
        f"([sweep.csv]({folder}/sweep.csv), commit {commits})."
    )


def _lengths(sampling: dict[str, Any]) -> str:
    """Return the tokens of an answer: one number, or the range that prompts draw from."""
    longest, spread = sampling["max_tokens"], sampling.get("spread", 0)
    return f"{longest * (1 - spread):.0f} to {longest * (1 + spread):.0f}" if spread else str(longest)


def _versions(row: Any) -> dict[str, str]:
    return dict(version.split("=") for version in row["versions"].split())


def _section(header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> str:
    filled = textwrap.fill(note, WIDTH, break_long_words=False, break_on_hyphens=False)
    return f"{markdown_table(header, rows)}\n\n{filled}"


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"


@click.command(help="Writes the tables of measured figures into the documents.")
def main() -> None:
    """Command line; see the module."""
    for document in DOCUMENTS:
        document.write_text(written(document), encoding="utf-8")


if __name__ == "__main__":
    main()
