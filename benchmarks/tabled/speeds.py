"""Tables of sweeps: speeds behind real servers, and their ratios."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from paired_ratio import MIN_ROUNDS, frame_baselines, paired_ratios, ratio_text, ratios_to_each, summarise
from serving.results import config_name, over_rounds

from tabled.layout import closed_loop, content_of, section, speed_text, versions_of

BESIDE_BUILTIN = ("users", "plain SGLang", "its DSPARK", "`auto`", "auto / plain", "auto / its DSPARK")


def speeds() -> str:
    """Return the speeds of plain serving, ``off`` and ``auto``, and the ratios between them, by number of users."""
    frame = closed_loop("sweep")
    pairs = paired_ratios(frame, "output_tok_s", frame_baselines(frame))
    ratios = summarise(pairs.assign(config=[config_name(frame, label) for label in pairs["config"]]))
    rows = []
    for users, cells in frame.groupby("concurrency"):
        by_name = {config_name(frame, str(label)): part for label, part in cells.groupby("config")}
        told = ratios[ratios["load"] == cells["load"].iloc[0]].set_index("config")
        rows.append(
            [
                str(users),
                *(speed_text(over_rounds(by_name[name], "output_tok_s")) for name in ("plain", "off", "auto")),
                *(ratio_text(told.loc[name]) for name in ("off", "auto")),
                f"{over_rounds(by_name['auto'], 'accept_length'):.2f}",
            ]
        )
    header = ("users", "plain SGLang", "plugin, `off`", "plugin, `auto`", "off / plain", "auto / off", "accept length")
    what = "Output tokens per second of all users together"
    return section(header, rows, _origin(what, frame))


def shape() -> str:
    """Return the speeds of Qwen3-8B's shape on an H200: plain, SGLang's own DSPARK, and ``auto``."""
    rows, sources = [], []
    for name in ("equal", "apart", "long"):
        folder = f"h200/qwen3_8b_shape/{name}"
        frame, asked = closed_loop(folder), content_of(f"{folder}/provenance.json")["sampling"]
        for users, cells, speeds in _beside_builtin(frame, "auto"):
            prompt = round(cells["num_prompt_tokens"].sum() / cells["num_requests"].sum())
            rows.append([str(prompt), _lengths(asked), users, *speeds])
        sources.append(f"[{name}]({folder}/sweep.csv)")
    first = frame.iloc[0]
    note = (
        f"Output tokens per second of all users together: Qwen3-8B's shape with random weights, {first['dtype']}, "
        f"{first['gpu']}, SGLang {versions_of(first)['sglang']}; medians of 2 or 3 rounds, ratios as geometric means "
        f"with the range of the rounds ({', '.join(sources)})."
    )
    return section(("prompt", "answer", *BESIDE_BUILTIN), rows, note)


def equal_work() -> str:
    """Return decode speeds of engines whose every step keeps as many drafts, and ratios of them and of whole rounds.

    One round has no spread, so the ratios have none. What was measured behind the profiles is left out.
    """
    folder = "h200/equal_work"
    frame = closed_loop(folder)
    frame = frame[frame["round"] == 0].assign(decode=1000 * frame["concurrency"] / frame["tpot_p50_ms"])
    ratios = (("decode", ("static7", "builtin")), ("decode", ("lean", "builtin")), ("decode", ("lean", "static7")))
    ratios += (("output_tok_s", ("static7", "builtin")), ("output_tok_s", ("lean", "builtin")))
    rows = []
    for users, cells in frame.groupby("concurrency"):
        by_name = cells.set_index("config").reindex(["plain", "builtin", "static7", "lean"])
        speeds = ["-" if pd.isna(speed) else speed_text(speed) for speed in by_name["decode"]]
        quotients = [by_name[metric][above] / by_name[metric][below] for metric, (above, below) in ratios]
        rows.append([str(users), *speeds, *("-" if pd.isna(ratio) else f"{ratio:.2f}" for ratio in quotients)])
    header = (
        *("users", "plain SGLang", "its DSPARK", "`static:7`", "lean drafter", "`static:7` / its DSPARK"),
        *("lean / its DSPARK", "lean / `static:7`", "wall: `static:7` / its DSPARK", "wall: lean / its DSPARK"),
    )
    first, asked = frame.iloc[0], content_of(f"{folder}/provenance.json")["sampling"]
    note = (
        "Output tokens per second of all users together behind their first tokens: users by the median time of a "
        "token; wall: all tokens by the time of the round, prompts included. Qwen3-8B's shape with random weights, "
        f"{first['dtype']}, {first['gpu']}, SGLang {versions_of(first)['sglang']}, prompts of 100 tokens, answers of "
        f"{_lengths(asked)}; one round ([sweep.csv]({folder}/sweep.csv), [provenance.json]({folder}/provenance.json))."
    )
    return section(header, rows, note)


def bundled_on_gpu() -> str:
    """Return the speeds of the bundled pair on an H200: plain, SGLang's own DSPARK, and ``auto``."""
    folder, others = "h200/sweep", ("scheduled", "tails")
    frame, rows = closed_loop(folder), []
    for users, cells, speeds in _beside_builtin(frame, "auto@bfloat16"):
        load = frame[frame["load"] == cells["load"].iloc[0]]
        beside = (speed_text(over_rounds(load[load["config"] == name], "output_tok_s")) for name in others)
        rows.append([users, *speeds, *beside])
    header = (*BESIDE_BUILTIN, "`scheduled`", "`auto`, block of 13")
    return section(header, rows, _origin("Output tokens per second of all users together", frame, folder))


def _beside_builtin(frame: pd.DataFrame, auto: str) -> Iterator[tuple[str, pd.DataFrame, list[str]]]:
    """Yield users, rows and the other cells of ``BESIDE_BUILTIN`` for each load of a sweep."""
    frame = frame[(frame["config"] == auto) | frame["policy"].isin(["plain", "builtin"])]
    told = summarise(ratios_to_each(frame, "output_tok_s", auto))
    told["policy"] = told["baseline"].map(dict(zip(frame["config"], frame["policy"], strict=True)))
    for users, cells in frame.groupby("concurrency"):
        by_policy = {policy: over_rounds(part, "output_tok_s") for policy, part in cells.groupby("policy")}
        beside = told[told["load"] == cells["load"].iloc[0]].set_index("policy")
        speeds = [speed_text(by_policy[policy]) for policy in ("plain", "builtin", "auto")]
        yield str(users), cells, [*speeds, *(ratio_text(beside.loc[of]) for of in ("plain", "builtin"))]


def fixed_lengths() -> str:
    """Return how fast ``auto`` is beside every fixed length, and how many drafts it verifies, by number of users."""
    frame = closed_loop("sweep")
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
    return section(header, rows, _origin(what, frame))


def oracle() -> str:
    """Return what drafts that are always right bring beside those of the bundled drafter."""
    frame = closed_loop("oracle")
    told = summarise(paired_ratios(frame, "output_tok_s", frame_baselines(frame))).set_index(["load", "config"])
    rows = []
    for users, cells in frame.groupby("concurrency"):
        by_policy = dict(iter(cells.groupby("policy")))
        drafted = [by_policy[policy] for policy in ("auto", "oracle")]
        ratios = [ratio_text(told.loc[(part["load"].iloc[0], part["config"].iloc[0])]) for part in drafted]
        lengths = [f"{over_rounds(part, 'accept_length'):.2f}" for part in drafted]
        rows.append([str(users), speed_text(over_rounds(by_policy["plain"], "output_tok_s")), *ratios, *lengths])
    header = ("users", "plain SGLang", "auto / plain", "oracle / plain", "accept length, auto", "oracle")
    return section(header, rows, _origin("Output tokens per second of all users together", frame, "oracle"))


def _origin(what: str, frame: pd.DataFrame, folder: str = "sweep") -> str:
    """Return a sentence on what a sweep of the bundled pair measured, where, and how often."""
    first, rounds = frame.iloc[0], frame["round"].nunique()
    versions = versions_of(first)
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
