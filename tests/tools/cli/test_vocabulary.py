"""`vocabulary` writes a list that servers read."""

import json

import pytest
from golden_server import TARGET
from letter_tokenizers import save_byte_tokenizer

from sglang_dspark.draft.reduced_vocabulary import read_token_ids


@pytest.fixture
def target(tmp_path):
    """The golden target, by a tokenizer of letters."""
    folder = save_byte_tokenizer(tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        if (TARGET / name).is_file():
            (folder / name).write_bytes((TARGET / name).read_bytes())
    return folder


def test_what_assistants_say_comes_first(run, target, tmp_path, server):
    rows = [{"messages": [{"role": "user", "content": "zz"}, {"role": "assistant", "content": "abba"}]}] * 10
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "list.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("vocabulary", "--target", target, "--prompts", prompts, "--output", output)
    result = run(*command, "--size", 5)
    assert result.exit_code == 0, result.output
    letters = [3 + '{}[]":, abcdefghijklmnopqrstuvwxyz'.index(letter) for letter in "ab"]
    assert read_token_ids(output, 256) == [0, 1, 2, *letters]
    said = " ".join(result.output.split())
    assert "10 answers and 10 texts of users. It covers 100.00%" in said
    assert f"--speculative-dspark-draft-vocabulary {output}" in result.output

    assert "Chosen in the same way from nine tenths of them, it covers" in said
    prompts.write_text(json.dumps(rows[0]) + "\n")
    assert "nine tenths" not in run(*command, "--size", 5).output  # there are no others

    assert run(*command, "--size", 5, "--url", server.url).exit_code == 0
    assert len(server.requests) == 1  # the same prompt once
    for size in (3, 300):
        refused = run(*command, "--size", size)
        assert (
            refused.exit_code == 1 and f"--size {size}: the target has 256 tokens, 3 of them special" in refused.output
        )
