"""Figures out of the committed results of benchmarks, as documents quote them."""

import json
from functools import cache
from pathlib import Path
from statistics import median

import pandas as pd
from paired_ratio import paired_ratios, ratios_to_each, summarise
from serving.results import over_rounds, read_sweep

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@cache
def sweep(name: str) -> pd.DataFrame:
    return read_sweep(RESULTS / name)


@cache
def content(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def cells(name: str, policy: str, users: str) -> pd.DataFrame:
    frame = sweep(name)
    return frame[(frame["config"] == f"{policy}@bfloat16") & (frame["concurrency"] == int(users))]


def ratio(name: str, policy: str, baseline: str, users: str, metric: str = "output_tok_s"):
    frame = sweep(name)
    frame = frame[frame["concurrency"] == int(users)]
    labels = [f"{policy}@bfloat16", f"{baseline}@bfloat16"]
    (row,) = summarise(
        paired_ratios(frame[frame["config"].isin(labels)], metric, dict.fromkeys(labels, labels[1]))
    ).itertuples()
    return row


def ratios(name: str, policy: str, baseline: str, *users: str) -> list[float]:
    return [ratio(name, policy, baseline, number).ratio for number in users]


def with_range(row) -> tuple[float, float, float]:
    return row.ratio, row.smallest, row.largest


def with_interval(row) -> tuple[float, float, float]:
    return row.ratio, row.low, row.high


README_SWEEP = "attribution/sweep.csv"


def readme_speeds(users: str, name: str = README_SWEEP):
    speeds = [over_rounds(cells(name, policy, users), "output_tok_s") for policy in ("plain", "off", "auto")]
    pairs = [ratio(name, *policies, users) for policies in (("off", "plain"), ("auto", "off"))]
    ranges = [figure for pair in pairs for figure in with_interval(pair)]
    return *speeds, *ranges, over_rounds(cells(name, "auto", users), "accept_length")


def h200_speeds(users: str):
    name = "h200/sweep/sweep.csv"
    median = {p: over_rounds(cells(name, p, users), "output_tok_s") for p in ("plain", "static:5", "auto")}
    both = [with_range(ratio(name, policy, "plain", users)) for policy in ("static:5", "auto")]
    one = [with_range(ratio(name, policy, "plain", users, "per_user_tok_s")) for policy in ("static:5", "auto")]
    return median["plain"], median["static:5"], *both[0], median["auto"], *both[1], *one[0], *one[1]


def turns(users: str):
    name, metric = "turns/turns.csv", "decode_tok_s"
    frame = sweep(name)
    frame = frame[frame["concurrency"] == int(users)]
    found = []
    for row in summarise(ratios_to_each(frame, metric, "auto@bfloat16")).sort_values("baseline").itertuples():
        found += [geometric_mean(frame, row.baseline, metric), row.ratio, row.low, row.high]
    drafts = frame[frame["config"] == "auto@bfloat16"]["mean_verify_len"].mean()
    return *found, geometric_mean(frame, "auto@bfloat16", metric), drafts


def few_users(*_: str) -> list[float]:
    """Ratios of turns with 2 users and with 1, then drafts, step times and accept lengths with 1."""
    frame = sweep("turns_few_users/turns.csv")
    found = []
    for users in (2, 1):
        part = frame[frame["concurrency"] == users]
        for row in (
            summarise(ratios_to_each(part, "decode_tok_s", "auto@bfloat16")).sort_values("baseline").itertuples()
        ):
            found += with_interval(row)
    alone = frame[frame["concurrency"] == 1].groupby("config")[["verified_tokens", "committed_tokens", "rounds"]].sum()
    labels = ["auto@bfloat16", "static:5@bfloat16"]
    found.append(alone["verified_tokens"][labels[0]] / alone["rounds"][labels[0]])
    found += [geometric_mean(frame[frame["concurrency"] == 1], label, "ms_per_step") for label in labels]
    return found + [alone["committed_tokens"][label] / alone["rounds"][label] for label in labels]


def geometric_mean(frame: pd.DataFrame, label: str, metric: str) -> float:
    values = frame[frame["config"] == label][metric]
    return float(values.prod() ** (1 / len(values)))


def worst_against(users: str, policy: str) -> tuple[float, ...]:
    """``auto`` against a fixed length, which has to be the one that it does worst against."""
    rows = {f"static:{n}": ratio(README_SWEEP, "auto", f"static:{n}", users) for n in range(1, 6)}
    assert policy == min(rows, key=lambda fixed: rows[fixed].ratio)
    return with_interval(rows[policy])


def lowest_bounds() -> list[float]:
    """Of the intervals of a row of turns."""
    return [min(turns(users)[2:16:4]) for users in ("1", "2", "4", "8", "16")]


def step_times(users: str) -> list[float]:
    table = content("sps_smollm2_cpu.json")
    row = table["requests"].index(int(users))
    verify = [table["verify_ms"][row][drafts][0] for drafts in (0, 1, 3, 5)]
    return [verify[0], table["draft_ms"][row][5][0], *verify[1:]]


def host_times(requests: str) -> list[float]:
    rows = [row for row in content("host_step.json")["results"] if row["requests"] == int(requests)]
    assert [row["configuration"] for row in rows] == ["plain", "parked", "static", "auto"]
    return [row[version]["quartile_us"] for row in rows for version in ("now", "before")]


def kernel_times(kernel: str, kind: str | None, vocabulary: str) -> list[float]:
    name = f"{'markov_sample' if kernel == 'draft_block' else kernel}_{kind}" if kind else kernel
    found = []
    for requests in (1, 8, 64, 256):
        rows = {"rows": 8 * requests} if kernel == "kv_inject" else {"bs": requests}
        shape = rows if vocabulary == "-" else rows | {"V": int(vocabulary.replace(",", ""))}
        (case,) = [
            case
            for case in content("h200/kernels.json")["cases"]
            if case["case"] == name
            and shape.items() <= case["shape"].items()
            and ("kept" not in case["shape"] or case["shape"]["kept"] < case["shape"]["rows"])
        ]
        found += [case["median_us"], case.get("floor_us"), case["reference_us"]]
    return found


def support_lengths(temperature: str) -> list[float]:
    by_support = {
        entry["support"]: entry["accept_length"]
        for entry in content("draft_support.json")["accept_lengths"]
        if entry["proposed_tokens"] == 49152 and entry["temperature"] == (0 if temperature == "greedy" else 1)
    }
    return [by_support[support] for support in (None, 2048, 1024, 512, 256)]


def support_cost() -> list[float]:
    """In percent, for 512 tokens: all tokens proposed, then as the bundled drafter is served; greedy, then sampled."""
    lengths = {
        (entry["proposed_tokens"], entry["temperature"], entry["support"]): entry["accept_length"]
        for entry in content("draft_support.json")["accept_lengths"]
    }
    return [
        100 * (1 - lengths[proposed, temperature, 512] / lengths[proposed, temperature, None])
        for proposed in (49152, 12288)
        for temperature in (0, 1)
    ]


def trained(name: str) -> list[float]:
    """Steps of ten minutes, the best held-out tokens per round; then accept lengths on a server."""
    file = "heads" if name == "new heads" else "dflash"
    lines = (RESULTS / "markov_head" / f"{file}.jsonl").read_text().splitlines()
    held_out = [report for report in map(json.loads, lines) if report["held_out"]]
    frame = sweep("markov_head/sweep.csv")
    static = frame[frame["config"] == f"{file}.static"]
    return [
        held_out[-1]["step"],
        max(report["tau"] for report in held_out),
        over_rounds(static, "accept_length"),
        *static["accept_length"].agg(["min", "max"]),
    ]


def planning_times() -> list[float]:
    choices = [part for part in content("planning.json")["parts"] if part["part"] == "Schedule.choose"]
    (clock,) = [
        part
        for part in content("planning.json")["parts"]
        if part["part"] == "StepTimes.observe" and part["drafter"] == "one depth"
    ]
    means, medians = ([part[key] for part in choices] for key in ("mean_us", "median_us"))
    return [min(means), max(means), min(medians), max(medians), clock["mean_us"]]


def walk() -> list[float]:
    """Minutes of the stages of training, minutes of all later steps; accept lengths, and the error of the last one."""
    found = content("training_walk.json")
    stages = [found["stages"][name] for name in ("texts", "training", "measuring")]
    later = sum(step["seconds"] for step in found["steps"] if step["step"] != "train")
    lengths = [found["held_out"][way]["accept_length"] for way in ("greedy", "sampled")]
    served = found["served"]
    return [
        *(seconds / 60 for seconds in (*stages, later)),
        *lengths,
        served["accept_length"],
        served["standard_error"],
    ]


def training_speeds() -> list[float]:
    """Blocks per second with 128 blocks per text, states computed and stored; then the ratios to the former trainer."""
    found = [
        next(result for result in content(f"training_speed/{name}.json")["results"] if result["size"] == "8x128")
        for name in ("computed", "stored")
    ]
    speeds = [median(run["blocks_per_s"] for run in result["runs"]["now"]) for result in found]
    return [*speeds, *(result["ratio"][1] for result in found)]
