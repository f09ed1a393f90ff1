"""Tests of the simulated server against what its policies promise, and of the page with sliders."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from chromium import chromium
from step_tables import GAMMA, compute_bound, costly_drafts, make_table, memory_bound

from sglang_dspark.errors import ConfigError
from sglang_dspark.scheduling.sps_table import SpsTable
from sglang_dspark.tools.simulator.server import Costs, Figures, Prefill, SimulatedServer
from sglang_dspark.tools.simulator.sweep import (
    BLOCK,
    CAPACITY,
    DECAY,
    FIRST,
    MODEL_USERS,
    Conditions,
    CrossoverModel,
    Point,
    crossover_page,
    crossovers,
    parse_policy,
    simulate_point,
    simulation_page,
    sweep,
)
from sglang_dspark.tools.simulator.workload import ConditionalAcceptance, Lengths, Workload

PREFILL = Prefill(batch_ms=20.0, token_ms=0.5)
ALWAYS, NEVER = (1.0,) * GAMMA, (0.0,) * GAMMA


def flat_table():
    """Any step takes 10 ms, drafting 2 more, whatever it holds."""
    return make_table(lambda r, d, c: 10.0 + 0 * r, lambda r, d, c: 2.0 + 0 * r)


def serve(policy, conditional, *, requests=1, users=1, output=41, prompt=100, seed=0):
    """One workload; acceptance without spread, no noise."""
    blocks = ConditionalAcceptance(tuple(conditional), concentration=np.inf)
    server = SimulatedServer(Costs(flat_table(), PREFILL), blocks, parse_policy(policy), seed=seed)
    return server.serve(Workload(requests, Lengths(prompt, prompt), Lengths(output, output), users=users))


def conditions(table, conditional):
    blocks = ConditionalAcceptance(tuple(conditional))
    return Conditions(Costs(table, PREFILL, noise=0.02), blocks, Lengths(64, 128), Lengths(40, 80))


def test_plain_decoding_takes_a_prefill_and_a_step_per_token():
    """Under overlap a result is looked at after the next step: the first token comes late, and a step is wasted."""
    outcome = serve("off", NEVER)
    (request,) = outcome.requests
    assert request.done_ms == pytest.approx(20 + 100 * 0.5 + 41 * 10)
    assert len(outcome.step_ms) == 41
    assert request.first_ms == pytest.approx(70 + 10)
    assert outcome.figures().parked == 1


def test_blocks_that_are_always_accepted_commit_whole_in_every_step():
    outcome = serve("static", ALWAYS, output=1 + 5 * (GAMMA + 1))
    assert len(outcome.rounds) == 5
    assert outcome.requests[0].done_ms == pytest.approx(70 + 6 * 12)
    figures = outcome.figures()
    assert (figures.accept_length, figures.verify_len, figures.wasted, figures.parked) == (GAMMA + 1, GAMMA, 0, 0)


def test_users_send_the_next_request_when_the_last_answer_is_complete():
    outcome = serve("off", NEVER, requests=3)
    ends = [request.done_ms for request in outcome.requests]
    assert ends == pytest.approx([480, 960, 1440])
    assert [request.sent_ms for request in outcome.requests] == pytest.approx([0, *ends[:-1]])


def test_prompts_that_wait_are_prefilled_together_and_before_the_next_step():
    outcome = serve("off", NEVER, requests=4, users=4)
    assert [request.first_ms for request in outcome.requests] == pytest.approx([20 + 400 * 0.5 + 10] * 4)


def test_a_prefill_batch_holds_no_more_tokens_than_allowed():
    """Two prompts of 3,000 tokens, and then the third one."""
    outcome = serve("off", NEVER, requests=3, users=3, prompt=3000)
    assert sorted(request.first_ms for request in outcome.requests) == pytest.approx([4540, 4540, 4550])


@pytest.mark.slow
def test_drafts_are_accepted_as_often_as_the_blocks_say():
    conditional = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    outcome = serve("static", conditional, requests=200, users=8, output=400)
    expected = conditional.cumprod().sum()
    assert outcome.figures().accept_length - 1 == pytest.approx(expected, abs=0.03)
    shorter = serve("static:2", conditional, requests=200, users=8, output=400)
    assert shorter.figures().accept_length - 1 == pytest.approx(0.9 + 0.72, abs=0.02)


def test_the_same_seed_gives_the_same_figures():
    runs = [serve("auto", [0.7] * GAMMA, requests=12, users=4, seed=seed).figures() for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@dataclass(frozen=True)
class InTurn:
    """Requests take their blocks from the sources in turn."""

    sources: tuple[ConditionalAcceptance, ...]
    gamma: int = GAMMA
    name: str = "in turn"

    def draw(self, requests, rng):
        (request,) = requests
        return self.sources[request % len(self.sources)].draw(requests, rng)


def lone_user_ms(policy, table, *rates):
    """Mean milliseconds of an answer, by kind of prompt; those of the first third of the prompts are left out."""
    blocks = InTurn(tuple(ConditionalAcceptance((rate,) * GAMMA) for rate in rates))
    server = SimulatedServer(Costs(table, Prefill(0.0, 0.0), noise=0.02), blocks, parse_policy(policy), seed=1)
    requests = server.serve(Workload(48, Lengths(64, 64), Lengths(128, 128), users=1)).requests[16:]
    kinds = range(len(rates))
    return [np.mean([r.done_ms - r.sent_ms for r in requests if r.index % len(rates) == kind]) for kind in kinds]


@pytest.mark.slow
@pytest.mark.thorough
def test_easy_and_hard_prompts_of_one_user_are_told_apart():
    """A speculative step takes 1.4 plain ones: whole blocks bring 3.2 times the speed on easy text, 0.8 on hard.

    Where drafts pay by little, bad luck costs the request some steps of them: its credit is used up.
    """
    table = costly_drafts(4.0, tiers=tuple(range(1, 17)))
    off, auto = (lone_user_ms(policy, table, 0.9, 0.12) for policy in ("off", "auto"))
    assert off[0] / auto[0] > 3
    assert off[1] / auto[1] > 0.95
    alike = [lone_user_ms(policy, table, 0.5)[0] for policy in ("static", "auto")]
    assert alike[1] < 1.04 * alike[0]


def test_live_policies_trim_by_the_confidences_of_the_step():
    made = conditions(compute_bound(), [0.8] * GAMMA)
    whole, threshold, early = (
        simulate_point(made, policy, 16).figures for policy in ("static", "threshold:0.6", "early-stop")
    )
    assert threshold.verify_len < whole.verify_len
    assert max(threshold.wasted, early.wasted) < whole.wasted
    assert early.output_tok_s > whole.output_tok_s


def test_lanes_are_the_first_steps_of_the_first_requests():
    outcome = serve("static:3", [0.8] * GAMMA, requests=4, users=4)
    lanes = outcome.lanes(2, 5)
    assert [len(steps) for steps in lanes] == [5, 5]
    assert {verified for steps in lanes for _, verified, _ in steps} == {3}
    first = [one.accepted for one in outcome.rounds if one.request == 1]
    assert [accepted for *_, accepted in lanes[1]] == first[:5]


@pytest.mark.parametrize(
    ("ratios", "users"),
    [
        ([2.0, 1.5, 1 / 1.5], 2 * 2 ** (1 / 2)),
        ([0.9, 1.1, 1 / 1.1], 2 * 2 ** (1 / 2)),
        ([1.5, 1.2, 1.0], None),
        ([1.0, 1.0, 0.99], None),  # simulated speeds are not that certain
        ([0.9, 0.8, 0.7], 1.0),
    ],
)
def test_where_speculation_stops_to_pay(ratios, users):
    speeds = {"off": (1.0,) * 3, "auto": ratios}
    points = [
        Point(policy, count, Figures(0.0, speed, *[0.0] * 10), [])
        for policy, row in speeds.items()
        for count, speed in zip((1, 2, 4), row, strict=True)
    ]
    assert crossovers(points) == {"off": None, "auto": None if users is None else pytest.approx(users)}


@pytest.mark.parametrize("text", ["fast", "static:x", "auto:3", "static:9"])
def test_policies_that_do_not_exist(text):
    with pytest.raises(ConfigError, match=text.partition(":")[2] or text):
        serve(text, ALWAYS)


def test_blocks_of_another_drafter():
    with pytest.raises(ConfigError, match="2 drafts and the SPS table is for 7"):
        serve("auto", [0.5, 0.5])


@pytest.mark.parametrize(("text", "mean"), [("128", 128), ("64-192", 128), ("~128", 128)])
def test_lengths(text, mean):
    rng = np.random.default_rng(0)
    drawn = [Lengths.parse(text).draw(rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.03)
    assert min(drawn) >= 1


@pytest.mark.parametrize("text", ["", "0", "x", "9-3", "~0", "-5"])
def test_what_is_no_length(text):
    with pytest.raises(ConfigError, match="is no length"):
        Lengths.parse(text)


@dataclass(frozen=True)
class Headless:
    """Blocks of a drafter without a confidence head."""

    blocks: ConditionalAcceptance
    name: str = "without a head"

    @property
    def gamma(self):
        return self.blocks.gamma

    def draw(self, requests, rng):
        return None, self.blocks.draw(requests, rng)[1]


CHAT = (0.735, 0.738, 0.740, 0.744, 0.758, 0.766, 0.761)
MATH = (0.905, 0.890, 0.888, 0.885, 0.887, 0.891, 0.882)
"""Acceptance by position that the paper has measured (Fig. 2)."""
COMMITTED = SpsTable.load(Path(__file__).parents[3] / "benchmarks" / "results" / "sweep" / "sps.json")
TABLES = {
    "the committed sweep": COMMITTED,
    "a target whose every token costs": compute_bound(),
    "a target that waits for its weights": memory_bound(),
}


@pytest.mark.slow
@pytest.mark.parametrize("users", [8, *(pytest.param(users, marks=pytest.mark.thorough) for users in (1, 64))])
@pytest.mark.parametrize("text", ["math", "chat", "hopeless"])
@pytest.mark.parametrize("name", TABLES)
def test_whole_blocks_or_none_are_never_slower_than_one_of_them(name, text, users):
    """With the acceptance by position alone, ``auto`` is as fast as the better of both."""
    table = TABLES[name]
    rates = {"math": MATH, "chat": CHAT}.get(text, (0.2,) * 7)[: table.gamma]
    blocks = Headless(ConditionalAcceptance((*rates, *[rates[-1]] * (table.gamma - len(rates)))))
    costs = Costs(replace(table, tiers=()), Prefill(0.0, 0.0), noise=0.02)
    given = Conditions(costs, blocks, Lengths(64, 128), Lengths(200, 200), uniform=True)
    speeds = {policy: simulate_point(given, policy, users).figures.output_tok_s for policy in ("auto", "static", "off")}
    assert speeds["auto"] > 0.98 * max(speeds["static"], speeds["off"]), speeds


def test_policies_that_decide_alike_are_equally_fast():
    """Their requests have the same luck, also after a warm-up, and whatever other requests took before them."""
    made = conditions(flat_table(), [0.8] * GAMMA)
    made = replace(made, costs=replace(made.costs, noise=0.0))
    whole, all_of_them = (
        simulate_point(made, policy, 8).figures.output_tok_s for policy in ("static", "threshold:0.0001")
    )
    assert all_of_them == pytest.approx(whole, rel=1e-9)


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


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(model_page, server_page):
    for page in (model_page, server_page):
        assert not re.search(r"https?://|src=|@import|url\(|<link", page)
        assert page.count("</script>") == 2


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_sliders_move_the_verdict(shown):
    move(shown, "Concurrent users", 0)
    assert text(shown, "verdict").startswith("With 1 user,")
    move(shown, "Concurrent users", 3)
    count = data_of(shown.page_source)["users"][3]
    assert text(shown, "verdict").startswith(f"With {count} users,")
    assert shown.execute_script("return document.querySelectorAll('#figures tr').length") == 4
    assert shown.execute_script("return document.querySelectorAll('.crossover').length") == 1


@pytest.mark.slow
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
