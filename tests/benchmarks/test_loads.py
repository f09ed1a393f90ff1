"""Step times of any load, by the few that were measured on a GPU."""

import pytest
from loads import MEASURED, step_times
from serving.results import over_rounds, read_sweep


@pytest.mark.parametrize("users", [1, 16, 64])
@pytest.mark.parametrize(("config", "depth"), [("off", 0), ("static7", 7), ("auto", 7)])
def test_measured_steps_take_what_was_measured(config, depth, users):
    """But for the rows that a tier has more."""
    frame = read_sweep(MEASURED)
    cells = frame[(frame["config"] == config) & (frame["concurrency"] == users)]
    rows = round(users * (1 + over_rounds(cells, "mean_verify_len")))
    found = step_times().step_ms(users, rows, depth, context=100)
    assert found == pytest.approx(over_rounds(cells, "itl_p50_ms"), rel=0.03)


def test_more_work_takes_no_less_time():
    table = step_times()
    for times in (table.verify_ms, table.draft_ms):
        assert (times[:, 1:] >= times[:, :-1]).all() and (times[1:] >= times[:-1]).all()
