"""The benchmark of policies in turns, on a real server."""

import asyncio
import sys
from pathlib import Path

from golden_server import assert_pool_is_whole, policy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from policy_turns import Turns
from serving.configurations import parse_configurations
from serving.prompts import Prompt


def test_every_policy_gets_its_turn_and_nothing_runs_on_after_it(dspark):
    prompts = [Prompt(index, "the red cat " * (index + 1)) for index in range(3)]
    configurations = parse_configurations(["static:2", "off"], (), "float32")
    turns = Turns(dspark, prompts, 60, raw=True)
    with policy(dspark, "auto"):
        rows = asyncio.run(turns.run(configurations, users=2, num_rounds=2))
    assert {(row["round"], row["policy"]) for row in rows} == {(n, name) for n in (0, 1) for name in ("off", "static")}
    assert len(rows) == 4
    for row in rows:
        assert row["mean_verify_len"] == (2 if row["policy"] == "static" else 0)
        assert row["committed_tokens"] == row["rounds"] + row["accepted_tokens"]
        assert 1.5 < row["rounds"] / row["steps"] <= 2  # both users, all the time
        assert 120 <= row["committed_tokens"] < 240
        assert row["decode_tok_s"] == row["committed_tokens"] / row["seconds"] > 0
    assert_pool_is_whole(dspark)  # waits for requests that still run
