"""The page with sliders: what it holds, and what a browser makes of it."""

import json
import re

import pytest
from chromium import chromium
from step_tables import compute_bound

from sglang_dspark.tools.simulator.server import Costs, Prefill
from sglang_dspark.tools.simulator.sweep import (
    BLOCK,
    CAPACITY,
    DECAY,
    FIRST,
    MODEL_USERS,
    Conditions,
    CrossoverModel,
    crossover_page,
    simulation_page,
    sweep,
)
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Lengths

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_page():
    return crossover_page()


@pytest.fixture(scope="module")
def server_page():
    conditions = Conditions(
        Costs(compute_bound(), Prefill(10.0, 0.1)),
        ConditionalAcceptance((0.7,) * 7),
        Lengths(64, 64),
        Lengths(40, 60),
        num_requests=32,
    )
    points = sweep(conditions, ("off", "static", "auto"), (1, 4, 16, 64))
    return simulation_page(points, "A formula", "</script> is harmless here")


def data_of(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_nothing_is_loaded_from_elsewhere(model_page, server_page):
    for page in (model_page, server_page):
        assert not re.search(r"https?://|src=|@import|url\(|<link", page)
        assert page.count("</script>") == 2


def test_every_setting_is_the_models(model_page):
    data = data_of(model_page)
    assert [axis["values"] for axis in data["axes"]] == [
        [f"{v:g}" for v in values] for values in (FIRST, DECAY, BLOCK, CAPACITY)
    ]
    place = ((2 * len(DECAY) + 1) * len(BLOCK) + 1) * len(CAPACITY) + 3
    model, setting = CrossoverModel(FIRST[2], DECAY[1], BLOCK[1], CAPACITY[3]), data["settings"][place]
    assert setting["crossovers"] == [None, pytest.approx(model.crossover), None]
    for policy, row in zip(data["policies"], setting["points"], strict=True):
        for users, (user, verified, accept, wasted, lanes) in zip(MODEL_USERS, row, strict=True):
            point = model.point(policy, users)
            expected = (point.user_speed, point.verify_len, point.accept_length, point.wasted)
            assert (user, verified, accept, wasted) == pytest.approx(expected, abs=1e-4)
            steps = [step for request in data["lanes"][lanes] for step in request]
            assert {step[1] for step in steps} == {verified}
            assert all(accepted <= verified <= drafted for drafted, verified, accepted in steps)


def test_a_simulated_server_has_its_lanes_and_its_crossover(server_page):
    data = data_of(server_page)
    (setting,) = data["settings"]
    assert [len(row) for row in setting["points"]] == [4, 4, 4]
    plain, static, auto = setting["crossovers"]
    assert (plain, auto) == (None, None)
    assert 1 < static < 64
    assert {step[1] for request in data["lanes"]["static 4"] for step in request} == {7}
    assert {step[0] for request in data["lanes"]["off 4"] for step in request} == {0}


@pytest.fixture(scope="module")
def browser():
    with chromium() as driver:
        yield driver


@pytest.fixture(params=["model", "server"])
def shown(request, browser, tmp_path):
    """The page in the browser."""
    path = tmp_path / "page.html"
    path.write_text(request.getfixturevalue(f"{request.param}_page"))
    browser.get(path.as_uri())
    yield browser
    assert browser.get_log("browser") == []


def move(browser, label, value):
    """Move a slider to a position, as a hand would."""
    browser.execute_script(
        "const input = [...document.querySelectorAll('label')].find(l => l.textContent.startsWith(arguments[0]))"
        ".parentElement.querySelector('input');"
        "input.value = arguments[1]; input.dispatchEvent(new Event('input'));",
        label,
        value,
    )


def text(browser, place):
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", place)


def test_sliders_move_the_verdict(shown):
    move(shown, "Concurrent users", 0)
    assert text(shown, "verdict").startswith("With 1 user,")
    move(shown, "Concurrent users", 3)
    count = data_of(shown.page_source)["users"][3]
    assert text(shown, "verdict").startswith(f"With {count} users,")
    assert shown.execute_script("return document.querySelectorAll('#figures tr').length") == 4
    assert shown.execute_script("return document.querySelectorAll('.crossover').length") == 1


def test_lanes_show_the_chosen_policy(shown):
    move(shown, "Concurrent users", 1)
    counts = []
    for policy in range(3):
        shown.execute_script(
            "const s = document.getElementById('policy'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
            policy,
        )
        counts.append(
            shown.execute_script(
                "return ['accepted', 'rejected', 'bonus'].map(n => document.querySelectorAll('#lanes .' + n).length)"
            )
        )
    assert counts[0][:2] == [0, 0]
    assert min(count[2] for count in counts) > 0
    assert counts[1][0] > 0 and counts[1][1] > 0
