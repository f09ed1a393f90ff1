"""Tables of the policy ``auto`` in simulated time."""

from __future__ import annotations

import numpy as np
import pandas as pd

from tabled.layout import RESULTS, content_of, section

WHOLE = "all parts"


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
    header = ("without", "recorded text", "largest loss", "where", "largest gain", "where")
    return section(header, rows, note)


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
    return section(("case", *frame.columns, "before, at worst"), rows, note)


def published() -> str:
    """Return where ``auto`` would have been in other engines' tables."""
    content = content_of("published.json")
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
    return section(header, rows, note)


def _extreme(cases: pd.DataFrame, which: str) -> tuple[str, str]:
    """Return the change of one case, and the case."""
    found = getattr(cases["mean"], which)()
    _, machine, traffic, load = found
    return f"{cases.loc[found, 'mean']:+.1f} ± {cases.loc[found, 'std']:.1f}", f"{traffic}, {machine}, {load}"
