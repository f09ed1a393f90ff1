"""``evaluate`` on a real server against the server's own counters."""

import itertools
import json

import pytest
from click.testing import CliRunner
from golden_server import counting, policy

from sglang_dspark.tools.cli import main
from sglang_dspark.tools.simulator.workload import RecordedBlocks

MAX_TOKENS, GAMMA = 40, 7
FIRST, SECOND = ("red", "old", "quick"), ("cat", "river", "lamp", "bird")


@pytest.mark.parametrize("temperature", [0, 1])
def test_accept_length_agrees_with_the_counters(dspark, tmp_path, temperature):
    prompts, output, blocks = (tmp_path / name for name in ("set.jsonl", "out.json", "blocks.jsonl"))
    texts = [f"{first} {second} sees the {second}" for first, second in itertools.product(FIRST, SECOND)]
    prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    options = ["--url", dspark.url, "--prompts", str(prompts), "--raw", "--temperature", str(temperature)]
    options += ["--max-tokens", str(MAX_TOKENS), "--output", str(output), "--blocks", str(blocks)]
    with policy(dspark, "static"), counting(dspark) as counts:
        result = CliRunner().invoke(main, ["evaluate", *options])
    assert result.exit_code == 0, result.output
    [measured] = json.loads(output.read_text())["results"]
    rounds, committed, accepted = (counts[key] for key in ("rounds", "committed_tokens", "accepted_tokens"))
    assert measured["rounds"] == rounds
    # The counters know nothing of stop tokens: what follows one in a block, and a bonus after it, they count.
    most_more = len(texts) * (GAMMA + 1)
    assert 0 <= committed - round(measured["accept_length"] * rounds) <= most_more
    assert accepted >= round(measured["survival"][0] * rounds)
    assert len(RecordedBlocks.load(blocks).accepted) <= rounds
    assert len(measured["confidence"]) == GAMMA
