"""Tables of what the bundled drafter is worth."""

from __future__ import annotations

import pandas as pd
from paired_ratio import paired_ratios, ratio_text, summarise

from tabled.layout import RESULTS, content_of, section


def calibration() -> str:
    """Return the calibration error of the bundled drafter's confidences, before and after calibration."""
    rows = []
    for temperature in (0, 1):
        content = content_of(f"calibration/sts_t{temperature}.json")
        for kind, key in (("raw head", "before"), ("STS", "after"), ("scale and shift", "shifted")):
            rows.append([str(temperature), kind, *(f"{100 * error:.1f}" for error in content[f"ece_{key}"])])
    header = ("temperature", "calibration", *map(str, range(1, len(rows[0]) - 1)))
    note = (
        "Expected calibration error of the prefix survival in percent, by draft, for the bundled pair on 200 prompts "
        "of GSM8K, HumanEval and MT-Bench that were not fitted ([provenance.json](calibration/provenance.json))."
    )
    return section(header, rows, note)


def accept_lengths() -> str:
    """Return what the target accepts of the bundled drafter, by prompt set, and of it without its parts."""
    content = content_of("h200/accept_length.json")
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
    return section(header, rows, note)


def draft_windows() -> str:
    """Return what a window on the context does to the bundled drafter, by the context's length."""
    frame = pd.read_csv(RESULTS / "draft_windows" / "draft_windows.csv")
    told = content_of("draft_windows/provenance.json")
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
    return section(("context", "drafter sees", "accept length", "step, ms", "speed, of whole context"), rows, note)
