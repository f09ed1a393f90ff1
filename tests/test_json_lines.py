"""JSON lines end at line feeds alone, and what prompt files hold."""

import json
from pathlib import Path

import pytest

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of
from sglang_dspark.tools.prompts import read_prompts

SEPARATORS = "\u2028\u2029\u0085"  # ends of lines to Python, letters to JSON


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\nb", "a\n\nb\n", f"a{SEPARATORS}b\nc"])
def test_lines_are_those_of_a_file(text, tmp_path):
    path = tmp_path / "lines"
    path.write_text(text, encoding="utf-8", newline="")
    with path.open(encoding="utf-8", newline="\n") as file:
        assert lines_of(text) == [line.removesuffix("\n") for line in file]


def test_prompts_may_hold_every_letter(tmp_path: Path):
    texts = [f"one{SEPARATORS}prompt", "another"]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" for text in texts), "utf-8")
    assert read_prompts(path) == texts


@pytest.mark.parametrize("line", ["{}", "[1]", '{"turns": []}', '{"turns": [3]}', '{"turns": "text"}', "text"])
def test_a_malformed_prompt_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "more"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2"):
        read_prompts(path)


def test_missing_and_empty_prompt_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        read_prompts(tmp_path / "absent.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="empty"):
        read_prompts(tmp_path / "empty.jsonl")
