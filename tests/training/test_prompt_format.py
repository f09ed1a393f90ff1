"""Prompts in files and data sets, as the target's token ids, and those that it invents with the golden tokenizer."""

import json
from pathlib import Path

import datasets
import pytest
from dspark_training.conversations import read_conversations
from dspark_training.prompt_format import PromptFormat
from transformers import AutoTokenizer

from sglang_dspark.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "target"
STOP = frozenset({1})
# Turns end with another token (<mask>) than answers (<eos>).
TEMPLATE = (
    "{% for m in messages %}<pad> {{ m.content }} <mask> {% endfor %}"
    "{% if add_generation_prompt %}the {% if quiet %}quiet {% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids(tokenizer, words):
    return tokenizer.convert_tokens_to_ids(words.split())


def test_a_prompt_goes_through_the_template_or_as_it_is(tokenizer):
    assert PromptFormat(tokenizer).encode("red cat") == ids(tokenizer, "<pad> red cat <mask> the")
    quiet = PromptFormat(tokenizer, template_kwargs={"quiet": True})
    assert quiet.encode("red cat") == ids(tokenizer, "<pad> red cat <mask> the quiet")
    assert PromptFormat(tokenizer, raw=True).encode("red cat") == ids(tokenizer, "red cat")


def test_the_template_is_opened_at_the_user_turn(tokenizer):
    assert PromptFormat(tokenizer).open_user_turn() == ids(tokenizer, "<pad>")
    assert PromptFormat(tokenizer).open_user_turn(" red") == ids(tokenizer, "<pad> red")


def test_an_opening_and_what_follows_it_stay_apart(tokenizer, monkeypatch):
    prompt_format = PromptFormat(tokenizer)
    monkeypatch.setattr(tokenizer, "decode", lambda *arguments, **options: " red cat ")
    assert "the" + prompt_format.invented_turn([*ids(tokenizer, "red cat"), *STOP], STOP) == "the red cat"


@pytest.mark.parametrize(
    ("written", "turn"),
    [
        ("red cat <eos>", "red cat"),
        ("red cat <mask> the dog <eos>", "red cat"),
        ("red cat <mask> the dog", "red cat"),
        ("red cat", None),
        ("red <pad> cat <eos>", None),
        ("<eos>", ""),
    ],
)
def test_an_invented_turn_ends_where_the_template_ends_it(tokenizer, written, turn):
    assert PromptFormat(tokenizer).invented_turn(ids(tokenizer, written), STOP) == turn


def test_what_cannot_be_opened_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="with --raw, give --prompts instead"):
        PromptFormat(tokenizer, raw=True).open_user_turn()
    tokenizer.chat_template = "{{ messages[0].content }} <mask>"
    with pytest.raises(ConfigError, match="puts nothing before the user's words"):
        PromptFormat(tokenizer).open_user_turn()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template; give --raw"):
        PromptFormat(tokenizer)


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
