"""Figures that the documents quote are those of the committed files, to the digit that is written.

A quote is a pattern in a section of a document, and what its numbers are computed from. A sentence or table that is
changed has to be changed here as well: a pattern that is not found fails.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from committed_figures import (
    README_SWEEP,
    few_users,
    h200_speeds,
    host_times,
    kernel_times,
    lowest_bounds,
    planning_times,
    ratios,
    readme_speeds,
    step_times,
    support_cost,
    support_lengths,
    trained,
    training_speeds,
    turns,
    walk,
    worst_against,
)

ROOT = Path(__file__).parents[2]
NUMBER = r"([\d,]+(?:\.\d+)?|\.\d+)"
RANGE = rf"{NUMBER}\s+\({NUMBER}\s+to\s+{NUMBER}\)"


@dataclass(frozen=True)
class Quote:
    """``figures`` gets the named groups of a match and returns what its other groups, numbers, have to be."""

    document: str
    section: str
    pattern: str
    matches: int
    figures: Callable[..., Sequence[float]]


PERFORMANCE = "docs/performance.md"
SPEED_ROW = rf"^\| (?P<users>\d+) \| {NUMBER} \| {NUMBER} \| {NUMBER} \| {RANGE} \| {RANGE} \| {NUMBER} \|"
TURN = rf"{NUMBER}; {RANGE}"
KERNEL_CELL = rf"{NUMBER} / (?:{NUMBER}|-) / {NUMBER}"
QUOTES = [
    Quote("README.md", "What it brings", SPEED_ROW, 5, readme_speeds),
    Quote(PERFORMANCE, "A CPU with AMX", SPEED_ROW, 5, lambda users: readme_speeds(users, "sweep_amx/sweep.csv")),
    Quote(
        "README.md",
        "What to expect on a GPU",
        rf"was {NUMBER} times as fast as plain SGLang for 1 user, and slower for 16 and 64: {NUMBER} and {NUMBER}",
        1,
        lambda: ratios("h200/sweep/sweep.csv", "auto", "plain", "1", "16", "64"),
    ),
    Quote(
        PERFORMANCE,
        "SmolLM2-135M on an H200",
        rf"^\| (?P<users>\d+) \| {NUMBER} \| {NUMBER} \| {RANGE} \| {NUMBER} \| {RANGE} \| {RANGE} \| {RANGE} \|",
        4,
        h200_speeds,
    ),
    Quote(
        PERFORMANCE,
        "SmolLM2-135M on an H200",
        rf"plain step reached {NUMBER}, {NUMBER}, {NUMBER} and {NUMBER} of the stock server's throughput",
        1,
        lambda: ratios("h200/sweep/sweep.csv", "off", "plain", "1", "4", "16", "64"),
    ),
    Quote(
        PERFORMANCE,
        "Kernels on an H200",
        r"^\| `(?P<kernel>\w+)`(?:, (?P<kind>greedy|sampled))?[^|]* \| (?P<vocabulary>[\d,]+|-)"
        + rf" \| {KERNEL_CELL}" * 4,
        12,
        kernel_times,
    ),
    Quote(
        PERFORMANCE,
        "Where a step's time goes on a CPU",
        r"^\| (?P<users>\d+)" + rf" \| {NUMBER}" * 5,
        5,
        step_times,
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        r"^\| (?P<users>\d+)" + rf" \| {TURN}" * 4 + rf" \| {NUMBER} \| {NUMBER} \|",
        5,
        turns,
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        rf"`auto` reaches {NUMBER}, {NUMBER}, {NUMBER}, {NUMBER} and {NUMBER} times\s+`static:1`",
        1,
        lambda: ratios(README_SWEEP, "auto", "static:1", "1", "2", "4", "8", "16"),
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        rf"and {NUMBER}, {NUMBER}, {NUMBER}, {NUMBER} and {NUMBER}\s+times `static:5`",
        1,
        lambda: ratios(README_SWEEP, "auto", "static:5", "1", "2", "4", "8", "16"),
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        rf"{RANGE}\s+of\s+`(?P<policy>static:\d)`\s+at (?P<users>\d+)",
        5,
        worst_against,
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        rf"decodes {RANGE}, {RANGE} and {RANGE}\s+times as fast as `static:3`.*?it is {RANGE}, {RANGE} and {RANGE}:.*?"
        rf"verifies {NUMBER} drafts.*?take\s+{NUMBER} and {NUMBER} ms there, "
        rf"and the accept lengths are {NUMBER} and {NUMBER}\.",
        1,
        few_users,
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        rf"the lowest of them: {NUMBER}, {NUMBER}, {NUMBER},\s+{NUMBER} and {NUMBER} at 1 to 16 users",
        1,
        lowest_bounds,
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        rf"the choice takes {NUMBER} to {NUMBER} microseconds in the mean, {NUMBER} to {NUMBER} in the median .*?"
        rf"learning the time of the step before {NUMBER}\.\s",
        1,
        planning_times,
    ),
    Quote(
        PERFORMANCE,
        "`auto` on a CPU",
        r"^\| (?P<requests>\d+)" + rf" \| {NUMBER}; {NUMBER}" * 4 + r" \|$",
        3,
        host_times,
    ),
    Quote(
        "docs/drafters.md",
        "What the Markov head is worth",
        rf"^\| (?P<name>new heads|plain DFlash) \| {NUMBER} \| {NUMBER} \| {RANGE} \|",
        2,
        trained,
    ),
    Quote(
        "docs/drafters.md",
        "What the Markov head is worth",
        rf"The heads bring {NUMBER} tokens per round here",
        1,
        lambda: [trained("new heads")[2] - trained("plain DFlash")[2]],
    ),
    Quote(
        PERFORMANCE,
        "Tried: a small support of the draft's law",
        r"^\| (?P<temperature>greedy|temperature 1)" + rf" \| {NUMBER}" * 5,
        2,
        support_lengths,
    ),
    Quote(
        PERFORMANCE,
        "Tried: a small support of the draft's law",
        rf"gives up {NUMBER} % of the tokens of greedy requests and {NUMBER} % of sampled ones, "
        rf"and {NUMBER} % and {NUMBER} %\s+where",
        1,
        support_cost,
    ),
    Quote(
        "docs/training.md",
        "On a CPU",
        rf"texts took {NUMBER} minutes, training {NUMBER}, measuring {NUMBER}; checking,\s+serving and calibrating "
        rf"another {NUMBER}\..*?accepts {NUMBER} tokens .*? and {NUMBER} at temperature 1\. Served, it accepted\s+"
        rf"{NUMBER} on 40 other questions, give or take {NUMBER}",
        1,
        walk,
    ),
    Quote(
        "docs/training.md",
        "What it needs",
        rf"reads {NUMBER} blocks per second .*? and {NUMBER} where the\s+states\s+are\s+stored\s.*?within the noise: "
        rf"{NUMBER} and {NUMBER} times",
        1,
        training_speeds,
    ),
]


def section_of(document: str, title: str) -> str:
    text = (ROOT / document).read_text()
    (body,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return body


def as_written(figure: float, quoted: str) -> bool:
    """Whether a figure, rounded to the digits of ``quoted``, is that number."""
    digits = len(quoted.partition(".")[2])
    return abs(figure - float(quoted.replace(",", ""))) <= 0.5 * 10**-digits * (1 + 1e-9)


@pytest.mark.parametrize(
    "quote", QUOTES, ids=lambda quote: f"{quote.document}: {quote.section[:20]} {quote.pattern[:24]}"
)
def test_quoted_figures_are_those_of_the_files(quote):
    found = list(re.finditer(quote.pattern, section_of(quote.document, quote.section), re.MULTILINE | re.DOTALL))
    assert len(found) == quote.matches, "the words of the document have changed: change them in QUOTES as well"
    for match in found:
        keys = match.groupdict()
        named = {match.re.groupindex[key] for key in keys}
        numbers = [text for index, text in enumerate(match.groups(), start=1) if index not in named]
        figures = quote.figures(**keys)
        # A kernel without a floor has a dash there.
        wrong = [
            (text, figure)
            for text, figure in zip(numbers, figures, strict=True)
            if text is not None and not as_written(figure, text)
        ]
        assert not wrong, f"{match.group(0)[:100]}: quoted and of the file: {wrong}"


@pytest.mark.parametrize(
    ("figure", "quoted", "right"),
    [
        (1.784, "1.78", True),
        (1.786, "1.78", False),
        (1271.4, "1,271", True),
        (0.0448, "0.045", True),
        (0.0451, "0.04", False),
        (2.25, "2.2", True),
        (2.25, "2.3", True),  # either rounding of a half
    ],
)
def test_figures_are_compared_to_the_written_digit(figure, quoted, right):
    assert as_written(figure, quoted) == right
