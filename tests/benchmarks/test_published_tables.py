"""Step times that follow from other engines' tables, and what `auto` would have done there."""

import json

import numpy as np
import pytest
from published_tables import (
    GLM_SURVIVAL,
    HEADS,
    QWEN3_8B,
    TABLES,
    V4_FLASH,
    drafts_needed,
    even_acceptance,
    rows,
    step_times,
)
from tables import RESULTS

CHANCE = 0.03  # simulated speeds that differ by less are equal: accept lengths vary by about 1 %


@pytest.mark.parametrize("published", TABLES, ids=lambda published: published.source)
def test_step_times_give_the_published_speeds(published):
    table = step_times(published)
    for users in published.users:
        whole = users * (1 + published.gamma)
        fixed = 1e3 * users * published.accept_length[users] / table.step_ms(users, whole, published.gamma, 1)
        assert fixed == pytest.approx(published.fixed[users], rel=0.015)
        if published.plain:
            assert 1e3 * users / table.step_ms(users, users, 0, 1) == pytest.approx(published.plain[users], rel=0.015)


def test_even_acceptance_gives_the_accept_length():
    (rate, *others) = even_acceptance(3.34, 7)
    assert set(others) == {rate} and len(others) == 6
    assert sum(rate**power for power in range(8)) == pytest.approx(3.34, abs=1e-3)


def test_all_drafts_are_needed_for_their_whole_accept_length():
    whole = 1 + sum(GLM_SURVIVAL)
    assert drafts_needed(GLM_SURVIVAL, whole - 0.01, float("inf")) > 15.5
    assert drafts_needed(GLM_SURVIVAL, 1 + GLM_SURVIVAL[0], float("inf")) == pytest.approx(1, abs=0.01)


def test_auto_is_never_below_the_better_of_plain_and_fixed():
    content = json.loads((RESULTS / "published.json").read_text())
    found = content["rows"]
    assert {(row["source"], row["users"], row["head"]) for row in found} == {
        (table.source, users, head) for table in TABLES for users in table.users for head in HEADS
    }
    for row in found:
        assert row["auto"] > (1 - CHANCE) * max(row["plain"], row["fixed"]), row
    [last] = [row for row in found if row["users"] == 256 and row["head"] == "each draft"]
    assert last["auto"] / last["plain"] > 1.4


@pytest.mark.slow
def test_the_committed_table_is_what_the_simulator_says():
    committed = json.loads((RESULTS / "published.json").read_text())
    expected = {(row["source"], row["users"], row["head"]): row for row in committed["rows"]}
    for row in rows(QWEN3_8B, committed["answer_tokens"], heads=["each draft"]):
        of_file = expected[row.source, row.users, row.head]
        for name in ("plain", "fixed", "auto"):
            assert getattr(row, name) == pytest.approx(of_file[name], rel=0.03)


def test_tokens_that_both_curves_have_take_as_long():
    """The accept length that the table leaves out is right if plain and fixed steps of as many tokens agree."""
    table = step_times(V4_FLASH)
    times = table.verify_ms[1:, :, 0]
    assert (np.diff(times[:, 0]) > 0).all() and (np.diff(times[:, -1]) > 0).all()
