"""The trainer finds prompts in files, folders of them, and data sets of the hub."""

import json

import datasets
import pytest
from dspark_training.conversations import read_conversations

from sglang_dspark.errors import ConfigError

ROW = {"conversations": [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "1"}]}
SILENT = {"conversations": []}


def test_a_folder_is_read_as_one_source(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [ROW, SILENT])))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "Two?"}))
    (tmp_path / "c.json").write_text(json.dumps([SILENT, {"turns": ["Three?", "Four?"]}]))
    (tmp_path / "LICENSE").write_text("of the data")
    assert read_conversations(str(tmp_path)) == [("One?",), ("Two?",), ("Three?", "Four?")]
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"--prompts {tmp_path}: 2 of 5 rows are left out")
    assert message.endswith(f"the first is {tmp_path}/a.jsonl:2")
    assert read_conversations(str(tmp_path / "a.jsonl")) == [("One?",)]


def test_a_data_set_of_the_hub_is_read_by_its_library(monkeypatch):
    asked = []

    def load_dataset(name, *config, split):
        asked.append((name, *config, split))
        return datasets.Dataset.from_list([ROW, SILENT, ROW])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_conversations("owner/name") == 2 * [("One?",)]
    read_conversations("owner/name:validation")
    read_conversations("owner/name:en:validation")
    assert asked == [("owner/name", "train"), ("owner/name", "validation"), ("owner/name", "en", "validation")]


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=rf"--prompts {tmp_path}: cannot be read \(no file ends in \.jsonl"):
        read_conversations(str(tmp_path))
    with pytest.raises(ConfigError, match=r"--prompts /nowhere/a.jsonl: cannot be read .*OWNER/NAME:SPLIT"):
        read_conversations("/nowhere/a.jsonl")
