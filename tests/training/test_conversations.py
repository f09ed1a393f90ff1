"""Prompts and conversations in every form that is read."""

import json

import datasets
import pyarrow as pa
import pytest
from dspark_training.conversations import read_conversations
from pyarrow import parquet

from sglang_dspark.errors import ConfigError

SHAREGPT = {
    "id": "7",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "One?"},
        {"from": "gpt", "value": "1"},
        {"from": "human", "value": "Two?"},
    ],
}
MESSAGES = {"messages": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]}
ROLES = {"conversations": [{"role": "user", "content": "One?"}, {"role": "user", "content": "Two?"}]}
FORMS = [
    ({"prompt": "One?"}, ("One?",)),
    ({"turns": ["One?", "Two?"]}, ("One?", "Two?")),
    (SHAREGPT, ("One?", "Two?")),
    (MESSAGES, ("One?",)),
    (ROLES, ("One?", "Two?")),
    # The first turn of a conversation may stand beside it, as in HuggingFaceH4/ultrachat_200k.
    ({"prompt": "One?"} | ROLES, ("One?", "Two?")),
    ({"prompt": "One?", "messages": ROLES["conversations"]}, ("One?", "Two?")),
    ({"prompt": "One?", "messages": None, "conversations": []}, ("One?",)),
    (MESSAGES | {"turns": ["Three?"], "prompt": "One?"}, ("Three?",)),
    # As in lmsys/lmsys-chat-1m, and with content in parts.
    ({"conversation": ROLES["conversations"]}, ("One?", "Two?")),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("One", "?")]}]}, ("One?",)),
    ({"prompt": [{"type": "text", "text": "One?"}]}, ("One?",)),
    ({"turns": ["One?", [{"type": "text", "text": "Two?"}]]}, ("One?", "Two?")),
]
SILENT = {"conversations": [{"from": "gpt", "value": "1"}]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("row", "turns"), FORMS)
def test_forms_of_a_row(row, turns, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert read_conversations(str(path)) == [turns]


def test_files_of_every_kind_hold_the_same(tmp_path):
    rows = [SHAREGPT, {"id": "8", "conversations": [{"from": "human", "value": "Three\u2028?"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    expected = [("One?", "Two?"), ("Three\u2028?",)]
    for name in ("a.jsonl", "b.json", "c.parquet"):
        assert read_conversations(str(tmp_path / name)) == expected, name
    with pytest.raises(ConfigError, match="the folder has 2 kinds of files"):
        read_conversations(str(tmp_path))
    (tmp_path / "c.parquet").unlink()
    (tmp_path / "LICENSE").write_text("of the data")
    assert read_conversations(str(tmp_path)) == 2 * expected


def test_a_data_set_of_the_hub_is_read_by_its_library(monkeypatch):
    asked = []

    def load_dataset(name, *config, split):
        asked.append((name, *config, split))
        return datasets.Dataset.from_list([SHAREGPT, SHAREGPT])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_conversations("owner/name") == 2 * [("One?", "Two?")]
    read_conversations("owner/name:validation")
    read_conversations("owner/name:en:validation")
    assert asked == [("owner/name", "train"), ("owner/name", "validation"), ("owner/name", "en", "validation")]


REFUSED = {
    "rows.jsonl": ('{"text": "a"}', r"rows.jsonl, row 1: .* has no text; write"),
    "torn.jsonl": ('{"turns": ["a"]}\n{"tur', r"torn.jsonl: cannot be read .*; give a JSONL, JSON or parquet file"),
    "parts.jsonl": (
        '{"messages": [{"role": "user", "content": [{"image": 1}]}]}',
        "parts.jsonl, row 1: .* has no text",
    ),
    "list.json": ('[{"prompt": 1}]', r"list.json, row 1: .* has no text; write"),
    "silent.jsonl": (json.dumps(SILENT), "silent.jsonl is empty; name prompts or conversations"),
    "torn.parquet": ("PAR1", r"torn.parquet: cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name, tmp_path):
    content, says = REFUSED[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_conversations(str(tmp_path / name))


def test_what_is_not_there_is_named(tmp_path):
    for source in (str(tmp_path), "/nowhere/a.jsonl"):
        with pytest.raises(ConfigError, match=rf"--prompts {source}: cannot be read .*OWNER/NAME:SPLIT"):
            read_conversations(source)
