"""Every switch of the network on a real server: greedy rounds are the literal drafter's, and sampled text the target's.

The stages alone: tests/worker/test_switches.py, and without any sampling error tests/exactness/test_enumeration.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_replay import load_target
from golden_server import CASES, TARGET, assert_pool_is_whole, counting, endless, generate, rounds_of
from literal_draft import LiteralDraft
from sampled_text import ALPHA, DEPTH, PROMPT, sample
from server_pool import Recipe
from switched_drafter import switched_drafter
from switches import SWITCHES
from target_distribution import Cell, TargetDistribution, p_value

from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools.launch import LaunchedServer, dspark_flags

# A drafter for the golden target, small enough for the loops of the literal one.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "vocab_size": 256,
    "num_target_layers": 6,
    "target_layer_ids": [-1, 1, 3],
    "mask_token_id": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
}
# What the golden target writes most, greedy and sampled: a drafter that knows nothing then meets it now and then.
LIKELY = [3, 7, *range(15, 27), 29, 33, 34, 35, 38, 39]
PROPOSED = sorted([*LIKELY, 41, 50, 59, 60])
TRACED = [CASES[number] for number in (0, 1, 3)]
NUM_TOKENS, NUM_SAMPLES = 16, 2048
HEAT = 1.5


@pytest.fixture(scope="module")
def distributions() -> dict[str, dict[Cell, float]]:
    """Return the distributions of the target, and of one that is 10 % cooler."""
    return {
        name: TargetDistribution(TARGET, PROMPT, temperature=heat).cells(DEPTH, min_prob=0.02)
        for name, heat in (("target", HEAT), ("cooler", 0.9 * HEAT))
    }


@pytest.mark.thorough
@pytest.mark.parametrize("kind", SWITCHES)
def test_every_switch(kind, distributions, server_pool, tmp_path):
    """Greedy and sampled requests in batches, and no K/V slot is lost.

    The distribution is of three drafted tokens, of which some are kept and most are not. It is biased where drafts are
    judged by another distribution than they were drawn from, as by columns of a reduced vocabulary that are off by one;
    where too many are kept; and where the token after a rejection may be any of the target's. A sample of this size is
    told from a target 10 % cooler.
    """
    folder = switched_drafter(tmp_path, kind, proposed=PROPOSED, likely=LIKELY, **SHAPE)
    recipe = Recipe(lambda _: (*dspark_flags(folder), "--speculative-dspark-schedule", "static"))
    own = tmp_path / "server"
    own.mkdir()
    with server_pool.lent(recipe, own) as server:
        assert_rounds_are_the_literal_drafters(server, folder)
        with counting(server) as counts:
            drawn = sample(server, {"temperature": HEAT}, NUM_SAMPLES)
        assert p_value(drawn, distributions["target"]) > ALPHA > p_value(drawn, distributions["cooler"])
        assert counts["accepted_tokens"] > 0.08 * counts["rounds"]
        assert_pool_is_whole(server)


def assert_rounds_are_the_literal_drafters(server: LaunchedServer, folder: Path) -> None:
    literal = LiteralDraft(folder)
    target = load_target(TARGET, load_draft_model(folder, dtype=torch.float32, device="cpu"))
    bodies = [endless(case["prompt_ids"], NUM_TOKENS, speculation={"trace": True}) for case in TRACED]
    drafted, kept = set(), 0
    for case, answer in zip(TRACED, generate(server, bodies, len(bodies)), strict=True):
        assert answer["output_ids"] == case["output_ids"][:NUM_TOKENS]
        text = [*case["prompt_ids"], *case["output_ids"]]
        features = target(text)[1].double()
        rounds = rounds_of(answer)
        anchor = len(case["prompt_ids"])
        for entry in rounds:
            assert (entry["start"], entry["anchor"]) == (anchor, text[anchor])
            assert entry["draft"] == literal.draft(features[:anchor], text[anchor])[0]
            assert entry["accepted"] == agreeing(entry["draft"], text[anchor + 1 :])
            drafted.add(tuple(entry["draft"]))
            kept += entry["accepted"]
            anchor += entry["accepted"] + 1
        assert anchor >= len(case["prompt_ids"]) + NUM_TOKENS - 1
    assert len(drafted) > 10 and kept > 0


def agreeing(drafts: Sequence[int], text: Sequence[int]) -> int:
    """Drafts before the first one that is not the text's."""
    pairs = zip(drafts, text, strict=False)
    return next((number for number, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
