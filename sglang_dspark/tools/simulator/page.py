"""A simulation as one HTML page with sliders, for which everything was computed beforehand; nothing else is loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np

from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.crossover import POLICIES, CrossoverModel
from sglang_dspark.tools.simulator.outcome import Outcome
from sglang_dspark.tools.simulator.sweep import Conditions, simulate_point

# Sliders of the crossover model.
FIRST = (0.5, 0.65, 0.8, 0.9, 0.95)
DECAY = (0.7, 0.85, 0.95, 1.0)
BLOCK = (3, 7, 15)
CAPACITY = (32, 64, 128, 256)
MODEL_USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_START = {"first": 0.9, "decay": 0.95, "block": 7, "capacity": 128}
_REQUESTS, _STEPS = 4, 12

Lanes = list[list[tuple[int, int, int]]]
"""[requests][steps] of drafts proposed, verified and accepted."""


def crossover_page() -> str:
    """The crossover model for every position of its sliders."""
    lanes: dict[str, Lanes] = {}
    settings = []
    for first, decay, block, capacity in product(FIRST, DECAY, BLOCK, CAPACITY):
        model = CrossoverModel(first, decay, block, capacity)
        points = []
        for policy in POLICIES:
            row = []
            for users in MODEL_USERS:
                point = model.point(policy, users)
                key = f"{first:g} {decay:g} {block} {point.verify_len}"
                if key not in lanes:
                    lanes[key] = _model_lanes(model, point.verify_len)
                row.append(_point(point.user_speed, point.verify_len, point.accept_length, point.wasted, key))
            points.append(row)
        settings.append({"crossover": model.crossover, "points": points})
    axes = [
        _axis("Acceptance of a block's first draft", FIRST, _START["first"]),
        _axis("Kept from draft to draft (a Markov head raises it)", DECAY, _START["decay"]),
        _axis("Drafts per block", BLOCK, _START["block"]),
        _axis("Tokens per step at no extra cost", CAPACITY, _START["capacity"]),
    ]
    return _render(
        title="Where speculation pays: the crossover model",
        note="A step takes one unit of time until its tokens fill the machine, and then in proportion to them. Fixed "
        "verifies whole blocks; scheduled verifies as many drafts as give the most tokens per unit of time.",
        unit="tokens per unit of time",
        policies=list(POLICIES),
        users=MODEL_USERS,
        start=MODEL_USERS.index(16),
        axes=axes,
        settings=settings,
        lanes=lanes,
    )


def simulation_page(
    conditions: Conditions,
    users: Sequence[int],
    title: str,
    note: str,
    on_point: Callable[[], None] = lambda: None,
) -> str:
    """The server's policies on measured step times: ``off``, whole blocks, ``auto``.

    Args:
        title, note: what was simulated.
        on_point: called after every simulated point.
    """
    policies = {"plain": "off", "fixed": "static", "scheduled": "auto"}
    lanes: dict[str, Lanes] = {}
    rows = []
    for shown, policy in policies.items():
        row = []
        for count in users:
            point, outcome = simulate_point(conditions, policy, users=count, lanes=_STEPS * 4)
            key = f"{shown} {count}"
            lanes[key] = _outcome_lanes(outcome)
            f = point.figures
            row.append(_point(f.user_tok_s, f.verify_len, f.accept_length, f.wasted, key))
            on_point()
        rows.append(row)
    ratios = [fixed[0] / plain[0] for plain, fixed in zip(rows[0], rows[1], strict=True)]
    return _render(
        title=title,
        note=note,
        unit="tokens per second",
        policies=[f"{shown} ({policy})" for shown, policy in policies.items()],
        users=users,
        start=len(users) // 2,
        axes=[],
        settings=[{"crossover": crossing(users, ratios), "points": rows}],
        lanes=lanes,
    )


def crossing(users: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Where the ratio falls below 1, on a logarithmic axis of users; None where it does not."""
    for place in range(1, len(users)):
        before, after = ratios[place - 1], ratios[place]
        if before >= 1 > after:
            share = (before - 1) / (before - after)
            low, high = math.log(users[place - 1]), math.log(users[place])
            return math.exp(low + share * (high - low))
    return None


def _model_lanes(model: CrossoverModel, verify_len: int) -> Lanes:
    """Steps of some requests that verify so many drafts; the same dice for all numbers of drafts."""
    conditional = tuple((model.first * model.decay ** np.arange(model.block)).tolist())
    source = ConditionalAcceptance(conditional, concentration=math.inf)
    accepted = source.draw(range(_REQUESTS * _STEPS), np.random.default_rng(1))[1].reshape(_REQUESTS, _STEPS)
    drafted = model.block if verify_len else 0
    return [[(drafted, verify_len, min(int(count), verify_len)) for count in row] for row in accepted]


def _outcome_lanes(outcome: Outcome) -> Lanes:
    """The first steps of the first requests."""
    lanes: dict[int, list[tuple[int, int, int]]] = {}
    for step in outcome.lanes:
        for lane in step:
            lanes.setdefault(lane.request, []).append((lane.drafted, lane.verified, lane.accepted))
    return [lanes[request][:_STEPS] for request in sorted(lanes)[:_REQUESTS]]


def _point(user: float, verified: float, accept: float, wasted: float, lanes: str) -> list[Any]:
    return [*(round(value, 4) for value in (user, verified, accept, wasted)), lanes]


def _axis(label: str, values: Sequence[float], start: float) -> dict[str, Any]:
    return {"label": label, "values": [f"{value:g}" for value in values], "start": values.index(start)}


def _render(**data: Any) -> str:
    template = files("sglang_dspark.tools.simulator").joinpath("page.html").read_text(encoding="utf-8")
    # Within a script element only this could end it.
    content = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return template.replace("DATA", content, 1)
