"""The benchmark of policies in turns, on a real server."""

import pytest
from golden_server import PACE_MS, assert_pool_is_whole, policy
from policy_turns import Turns
from serving.client import Sampling
from serving.configurations import Configuration, parse_configurations
from serving.prompts import Prompt

from sglang_dspark.errors import DSparkError

PROMPTS = [Prompt(index, "the red cat " * (index + 1)) for index in range(3)]


class Paced(Configuration):
    """Steps of this policy take a while, so that answers last for all turns on a fast machine too."""

    @property
    def policy_fields(self):
        return super().policy_fields | {"pace_ms": PACE_MS}


def measured(server, max_tokens, kind=Configuration):
    parsed = parse_configurations(["static:2", "off"], "float32")
    configurations = [kind(each.label, each.policy, each.argument, each.dtype) for each in parsed]
    turns = Turns(server, PROMPTS, 0.05, 2, Sampling(max_tokens, temperature=0.0, ignore_eos=True, raw=True))
    with policy(server, "auto"):
        return turns.run(configurations, users=2, num_rounds=2)


def test_every_policy_gets_its_turns_and_nothing_runs_on_after_them(corner):
    rows = measured(corner, 900, Paced)
    assert [(row["round"], row["policy"]) for row in rows] == [(0, "static"), (0, "off"), (1, "static"), (1, "off")]
    for row in rows:
        assert row["mean_verify_len"] == (2 if row["policy"] == "static" else 0)
        assert row["committed_tokens"] == row["rounds"] + row["accepted_tokens"]
        assert row["rounds"] == 2 * row["steps"]  # both users, all the time
        assert row["decode_tok_s"] == row["committed_tokens"] / row["seconds"] > 0
        assert 4 * 0.05 < row["seconds"] < 20
    assert_pool_is_whole(corner)  # waits for requests that still run


def test_answers_that_do_not_last_for_all_turns(corner):
    with pytest.raises(DSparkError, match="raise --max-tokens"):
        measured(corner, 4)
