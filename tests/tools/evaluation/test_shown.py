"""An evaluation as it is shown: tables that fit."""

import io
import random

import pytest
from rich.console import Console

from sglang_dspark.tools.cli.measure import _tables
from sglang_dspark.tools.evaluation import Answer, MeasuredSet

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
