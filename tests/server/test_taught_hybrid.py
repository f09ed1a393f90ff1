"""A target with gated delta nets that has learned something, and the drafter that `train` makes for it, on servers."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
from golden_server import endless, generate, output_ids, policy
from server_pool import NO_SNAPSHOTS, Recipe
from taught_hybrid import sentence, taught_hybrid
from transformers import PreTrainedTokenizerFast

from sglang_dspark.tools.launch import dspark_flags

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

NUM_TOKENS = 48
STATES = ("--max-mamba-cache-size", "48", "--context-length", "256")
TRAINING = (
    *("--raw", "--max-tokens", "48", "--held-out", "16", "--block-size", "5", "--rank", "32"),
    *("--steps", "300", "--batch-rows", "8", "--anchors", "12", "--learning-rate", "2e-3", "--checkpoint-every", "100"),
)


def begun(draw):
    """Return a sentence and the beginning of another one."""
    return sentence(draw) + sentence(draw)[: draw.randint(4, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds ``target`` and, below ``run``, its drafter."""
    path, draw = tmp_path_factory.mktemp("taught"), random.Random(1)
    (path / "target").mkdir()
    taught_hybrid(path / "target")
    rows = [json.dumps({"turns": [begun(draw)]}) + "\n" for _ in range(160)]
    (path / "prompts.jsonl").write_text("".join(rows))
    paths = ("--target", path / "target", "--output", path / "run", "--prompts", path / "prompts.jsonl")
    command = (sys.executable, "-m", "sglang_dspark", "train", *map(str, paths), *TRAINING, "--device", "cpu")
    subprocess.run(command, check=True)
    return path


def test_texts_are_those_of_the_plain_server_in_fewer_steps(folder, server_pool, tmp_path):
    tokenizer, draw = PreTrainedTokenizerFast.from_pretrained(folder / "target"), random.Random(2)
    bodies = [endless(tokenizer(begun(draw))["input_ids"], NUM_TOKENS) for _ in range(12)]

    def server(name, *flags):
        (tmp_path / name).mkdir()
        return server_pool.lent(Recipe(lambda _: (*STATES, *flags), model=lambda _: folder / "target"), tmp_path / name)

    with server("plain", *NO_SNAPSHOTS) as plain:
        expected = output_ids(plain, bodies, 4)
    assert len(set(map(tuple, expected))) > 6
    with server("dspark", *dspark_flags(folder / "run" / "draft")) as dspark:
        assert dspark.get_json("/dspark/stats")["policy"] == "auto"
        assert output_ids(dspark, bodies, 4) == expected
        assert dspark.get_json("/dspark/stats")["accept_length"] > 1.2
        with policy(dspark, "static"):
            answers = generate(dspark, bodies, 4)
    assert [answer["output_ids"] for answer in answers] == expected
    steps = [NUM_TOKENS / answer["meta_info"]["spec_accept_length"] for answer in answers]
    assert NUM_TOKENS * len(answers) / sum(steps) > 1.5
