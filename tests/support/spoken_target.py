"""The golden target with other words for some tokens: those of a tool call, and marks of reasoning."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from golden_server import CASES, TARGET

TOOL_CALL, REASONING = CASES[1]["prompt_ids"], CASES[2]["prompt_ids"]
"""Prompts: after the first the target writes a tool call, after the second a mark of two tokens, and numbers."""

END = 103
"""A token that ends texts, of which the tokenizer knows nothing; the twelfth one after `REASONING`."""

_WORDS = {
    59: "Sure",
    60: "<tool_call>\n",
    39: '{"name": "get_time',
    33: '", "arguments": ',
    13: "{}",
    21: "}",
    29: "\n</tool_call>",
    97: "</thi",
    98: "nk>",
    140: "<think>",
    141: "</think>",  # SGLang counts reasoning by a token
}
THINK_END = 141
CHAT = "{% for message in messages %}{{ message.content }}{% endfor %}"


def spoken_target(folder: Path) -> Path:
    """Write it, with a chat template that is the content alone; returns its folder."""
    path = folder / "target"
    shutil.copytree(TARGET, path, dirs_exist_ok=True)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = {id_: word for word, id_ in tokenizer["model"]["vocab"].items()} | _WORDS
    tokenizer["model"]["vocab"] = {word: id_ for id_, word in words.items()}
    tokenizer["decoder"] = {"type": "Fuse"}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    generation = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": [1, END]}))
    (path / "chat_template.jinja").write_text(CHAT)
    return path
