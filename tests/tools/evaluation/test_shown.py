"""An evaluation as it is shown: tables that fit, and figures whose panels and caption can be read."""

import io
import random

import pytest
from rich.console import Console

from sglang_dspark.tools.cli.evaluate import _tables
from sglang_dspark.tools.evaluation.measured_set import MeasuredSet
from sglang_dspark.tools.evaluation.trace_client import Answer

GAMMA, COLUMNS = 7, 100


def measured_set(name, rounds=400, *, has_head=True):
    rng, trace = random.Random(name), [None]
    for _ in range(rounds):
        confidence = [rng.gauss(1, 2) for _ in range(GAMMA)] if has_head else None
        accepted = rng.randint(0, GAMMA)
        entry = {"draft": [7] * GAMMA, "confidence": confidence, "verified": GAMMA, "accepted": accepted}
        trace += [entry, *[None] * accepted]
    return MeasuredSet.from_answers(name, [Answer(trace, len(trace), False)], GAMMA)


@pytest.mark.parametrize("has_head", [True, False])
def test_tables_fit_a_hundred_columns(has_head):
    measured = [measured_set(name, has_head=has_head) for name in ("gsm8k", "humaneval", "mt-bench", "livecodebench")]
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    for table in _tables(measured):
        assert console.measure(table).maximum <= COLUMNS
        console.print(table)
    shown = console.export_text()
    assert f"{measured[3].conditional[GAMMA - 1]:.3f}" in shown
    if has_head:
        assert all(f"{row['verified']:.2f}" in shown for row in measured[1].thresholds())


@pytest.mark.parametrize(
    ("rounds", "has_head", "words"),
    [(400, True, []), (400, False, ["no confidence head"] * 2), (2, True, ["fewer than 20 rounds in every bin"])],
)
def test_empty_panels_say_why(rounds, has_head, words):
    pytest.importorskip("matplotlib")
    from sglang_dspark.tools.evaluation.figure import evaluation_figure

    figure = evaluation_figure([measured_set("math", rounds, has_head=has_head)], "a pair")
    found = [text.get_text() for axes in figure.axes[2:] for text in axes.texts]
    assert [text for text in found if text.startswith(("no ", "fewer "))] == words


def test_the_caption_fits_the_figure():
    pytest.importorskip("matplotlib")
    from sglang_dspark.tools.evaluation.figure import evaluation_figure

    figure = evaluation_figure([measured_set("math")], "a target with a rather long name " * 12)
    figure.draw_without_rendering()
    [caption] = [text for text in figure.texts if "rather long" in text.get_text()]
    extent = caption.get_window_extent()
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.x1
