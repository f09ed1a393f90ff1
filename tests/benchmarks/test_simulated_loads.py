"""Step times of simulated loads: measured ones where there are any."""

import numpy as np
import pytest
from shape_pair import ACCEPTANCE
from simulated_loads import BYTES_LESS, BYTES_PER_MS, KINDS, tables, with_accept_length


def test_whole_blocks_take_what_was_measured():
    times = {
        name: [table.step_ms(users, 8 * users, 7, 100) for users in (1, 16, 64)] for name, table in tables().items()
    }
    assert times["own"] == pytest.approx([6.548, 7.604, 16.957], abs=1e-3)
    assert times["builtin"] == pytest.approx([6.810, 7.597, 16.388], abs=1e-3)
    saved = BYTES_LESS / BYTES_PER_MS  # by 8 bits, in few rows
    assert times["lean"] == pytest.approx([6.325 - saved, 7.134 - saved, 16.162], abs=1e-3)


def test_what_drafts_nothing_takes_the_same_time():
    plain = [table.verify_ms[:, 0] + table.draft_ms[:, 0] for table in tables().values()]
    assert all(np.array_equal(plain[0], other) for other in plain[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_drafts_are_kept_of_a_lean_drafter(kind):
    lengths = [1 + np.cumprod(rates).sum() for rates in (ACCEPTANCE[kind], with_accept_length(kind, 0.987).conditional)]
    assert lengths[1] / lengths[0] == pytest.approx(0.987, abs=1e-4)
