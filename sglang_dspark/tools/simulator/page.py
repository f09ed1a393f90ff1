"""A simulation as one HTML page with sliders, for which everything was computed beforehand; nothing else is loaded."""

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np

from sglang_dspark.tools.simulator.blocks import ConditionalAcceptance
from sglang_dspark.tools.simulator.crossover import POLICIES, CrossoverModel
from sglang_dspark.tools.simulator.outcome import Lanes
from sglang_dspark.tools.simulator.sweep import SHOWN_REQUESTS, SHOWN_STEPS, Point, crossovers

# Sliders of the crossover model.
FIRST = (0.5, 0.65, 0.8, 0.9, 0.95)
DECAY = (0.7, 0.85, 0.95, 1.0)
BLOCK = (3, 7, 15)
CAPACITY = (32, 64, 128, 256)
MODEL_USERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def crossover_page() -> str:
    """Render the crossover model for every position of its sliders."""
    start, lanes, settings = CrossoverModel(), dict[str, Lanes](), []
    for model in (CrossoverModel(*values) for values in product(FIRST, DECAY, BLOCK, CAPACITY)):
        rows = []
        for policy in POLICIES:
            row = []
            for point in (model.point(policy, users) for users in MODEL_USERS):
                key = f"{model.first} {model.decay} {model.block} {point.verify_len}"
                if key not in lanes:
                    lanes[key] = _model_lanes(model, point.verify_len)
                row.append(_cell(point.user_speed, point.verify_len, point.accept_length, point.wasted, key))
            rows.append(row)
        settings.append({"crossovers": [None, model.crossover, None], "points": rows})
    axes = [
        _axis("Acceptance of a block's first draft", FIRST, start.first),
        _axis("Kept from draft to draft (a Markov head raises it)", DECAY, start.decay),
        _axis("Drafts per block", BLOCK, start.block),
        _axis("Tokens per step at no extra cost", CAPACITY, start.capacity),
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


def simulation_page(points: Sequence[Point], title: str, note: str) -> str:
    """Render a simulated sweep whose first policy is the plain one.

    Args:
        title, note: what was simulated.
    """
    found = crossovers(points)
    lanes, rows = {}, []
    for policy in found:
        row = []
        for point in (point for point in points if point.policy == policy):
            key, f = f"{policy} {point.users}", point.figures
            lanes[key] = point.lanes
            row.append(_cell(f.user_tok_s, f.verify_len, f.accept_length, f.wasted, key))
        rows.append(row)
    users = list(dict.fromkeys(point.users for point in points))
    return _render(
        title=title,
        note=note,
        unit="tokens per second",
        policies=list(found),
        users=users,
        start=len(users) // 2,
        axes=[],
        settings=[{"crossovers": list(found.values()), "points": rows}],
        lanes=lanes,
    )


def _model_lanes(model: CrossoverModel, verify_len: int) -> Lanes:
    """Draw steps of some requests that verify so many drafts; the same dice for all numbers of drafts."""
    conditional = tuple((model.first * model.decay ** np.arange(model.block)).tolist())
    source = ConditionalAcceptance(conditional, concentration=math.inf)
    accepted = source.draw(range(SHOWN_REQUESTS * SHOWN_STEPS), np.random.default_rng(1))[1].reshape(
        SHOWN_REQUESTS, SHOWN_STEPS
    )
    drafted = model.block if verify_len else 0
    return [[(drafted, verify_len, min(int(count), verify_len)) for count in row] for row in accepted]


def _cell(user: float, verified: float, accept: float, wasted: float, lanes: str) -> list[Any]:
    return [*(round(value, 4) for value in (user, verified, accept, wasted)), lanes]


def _axis(label: str, values: Sequence[float], start: float) -> dict[str, Any]:
    return {"label": label, "values": [f"{value:g}" for value in values], "start": values.index(start)}


def _render(**data: Any) -> str:
    template = files("sglang_dspark.tools.simulator").joinpath("page.html").read_text(encoding="utf-8")
    # Within a script element only this could end it.
    content = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return template.replace("DATA", content, 1)
