"""Recorded answers as drafts of a sweep."""

import pytest
from serving.client import Sampling
from serving.configurations import parse_configuration
from serving.oracle import check_oracle, recorded_drafts
from serving.prompts import Prompt

from sglang_dspark.errors import ConfigError

GREEDY = Sampling(max_tokens=9, temperature=0)


class Server:
    """Answers each prompt with its length, three times."""

    def __init__(self):
        self.bodies = []

    def post_json(self, path, body):
        self.bodies.append((path, body))
        return {"sglext": {"output_ids": [[len(body["messages"][0]["content"])] * 3]}}


@pytest.mark.parametrize(("text", "more"), [("oracle", {}), ("oracle:5", {"verify_len": 5})])
def test_drafts_are_what_the_server_has_answered(text, more):
    server, oracle = Server(), parse_configuration(text, "float32")
    fields = recorded_drafts(server, oracle, [Prompt(4, "ab"), Prompt(9, "c")], GREEDY, users=2)
    assert fields == {4: {"preset": "replay", "recorded": [2, 2, 2]}, 9: {"preset": "replay", "recorded": [1, 1, 1]}}
    path, body = server.bodies[0]
    assert (path, body["speculation"], body["stream"]) == ("/v1/chat/completions", {"enabled": False}, False)
    assert oracle.is_dspark and oracle.policy_fields == {"policy": "static", **more}


@pytest.mark.parametrize("sampling", [Sampling(9, temperature=1), Sampling(9, temperature=0, raw=True)])
def test_what_cannot_be_recorded_is_refused(sampling):
    with pytest.raises(ConfigError, match=r"oracle.*leave out --temperature and --raw-prompts"):
        check_oracle(parse_configuration("oracle", "float32"), sampling)
    check_oracle(parse_configuration("auto", "float32"), sampling)
