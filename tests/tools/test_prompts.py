"""Tests of files of prompts, of a tool's requests, and of lists of tokens for a drafter."""

import json
import logging

import pytest
from fake_server import FakeServer, NotOk
from golden_server import TARGET
from letter_tokenizers import save_byte_tokenizer
from transformers import AutoTokenizer

from sglang_dspark.draft.reduced_vocabulary import Tokens, Traffic, coverage
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.evaluation import Answer
from sglang_dspark.tools.launch import JsonClient
from sglang_dspark.tools.prompts import conversations_of, read_answers, read_prompts, read_rows


def read_conversations(path):
    return conversations_of(read_rows(path), str(path))


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
PARTS = [{"type": "text", "text": "One"}, {"type": "text", "text": "?"}]
FORMS = [
    ({"prompt": "One?"}, ("One?",)),
    ({"turns": ["One?", "Two?"]}, ("One?", "Two?")),
    (SHAREGPT, ("One?", "Two?")),
    (MESSAGES, ("One?",)),
    (ROLES, ("One?", "Two?")),
    # The first turn of a conversation may stand next to it, as in HuggingFaceH4/ultrachat_200k.
    ({"prompt": "One?"} | ROLES, ("One?", "Two?")),
    ({"prompt": "One?", "messages": ROLES["conversations"]}, ("One?", "Two?")),
    ({"prompt": "One?", "messages": None, "conversations": []}, ("One?",)),
    (MESSAGES | {"turns": ["Three?"], "prompt": "One?"}, ("Three?",)),
    (MESSAGES | {"turns": None}, ("One?",)),
    # A form that says nothing, or none that is read, gives way to the next one.
    ({"messages": [{"role": "system", "content": "Be brief."}], "prompt": "One?"}, ("One?",)),
    ({"messages": [{"role": "user", "content": " "}], "prompt": "One?"}, ("One?",)),
    ({"turns": 3, "prompt": "One?"}, ("One?",)),
    # As in lmsys/lmsys-chat-1m, and as TRL has it.
    ({"conversation": ROLES["conversations"]}, ("One?", "Two?")),
    ({"prompt": ROLES["conversations"]}, ("One?", "Two?")),
    ({"messages": [{"role": "user", "from": None, "content": None, "value": "One?"}]}, ("One?",)),
    ({"messages": [{"role": "User", "content": "One?"}, {"role": "assistant", "tool_calls": []}]}, ("One?",)),
    # With content in parts.
    ({"messages": [{"role": "user", "content": PARTS}]}, ("One?",)),
    ({"prompt": PARTS}, ("One?",)),
    ({"turns": ["Two?", PARTS]}, ("Two?", "One?")),
    # A turn that says nothing.
    ({"messages": [{"role": "user", "content": None}, {"role": "user", "content": "One?"}]}, ("One?",)),
    ({"turns": ["One?", None, " "]}, ("One?",)),
]


@pytest.mark.parametrize(("row", "turns"), FORMS)
def test_forms_of_a_row(row, turns, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(MESSAGES) + "\n")
    assert read_conversations(path) == [turns, ("One?",)]


SILENT = [
    {"id": "x", "conversations": []},
    {"messages": []},
    {"messages": None},
    {"turns": []},
    {"prompt": ""},
    {"prompt": None, "turns": None},
    {"conversations": [{"from": "gpt", "value": "1"}]},
    {"messages": [{"role": "user", "content": " \n"}]},
    {"messages": [{"role": "user", "content": []}]},
]


@pytest.mark.parametrize("row", SILENT)
def test_rows_in_which_no_user_says_anything_are_left_out(row, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in (MESSAGES, row, SHAREGPT, row)))
    assert read_conversations(path) == [("One?",), ("One?", "Two?")]
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (
            logging.WARNING,
            f"--prompts {path}: 2 of 4 rows are left out, because no user says anything in them; the first is {path}:2",
        )
    ]
    assert read_prompts(path) == ["One?"]


def test_files_of_every_kind_hold_the_same(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import Table

    rows = [SHAREGPT, {"id": "8", "conversations": [{"from": "human", "value": "Three\u2028\u0085?"}]}]
    texts = {
        "lines.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n",
        "windows.jsonl": "\ufeff" + "\r\n".join(map(json.dumps, rows)),
        "lines": "\n".join(map(json.dumps, rows)),
        "array.json": json.dumps(rows, indent=1),
        "marked.json": "\ufeff" + json.dumps(rows),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    parquet.write_table(Table.from_pylist(rows), tmp_path / "table.parquet")
    for path in sorted(tmp_path.iterdir()):
        assert read_conversations(path) == [("One?", "Two?"), ("Three\u2028\u0085?",)], path.name


REFUSED = {
    "rows.jsonl": ('{"text": "a"}', r'rows\.jsonl:1: .* has no text; write {"turns"'),
    "second.jsonl": ('{"prompt": "a"}\n\n{"text": "b"}', r"second\.jsonl:3: .* has no text"),
    "empty.jsonl": ("", r"--prompts .*empty\.jsonl is empty"),
    "object.jsonl": ('{"prompt": "a"}\n{}', r"object\.jsonl:2: .* has no text"),
    "list.jsonl": ('{"prompt": "a"}\n[1]', r"list\.jsonl:2: .* has no text"),
    "item.jsonl": ('{"prompt": "a"}\n{"turns": [3]}', r"item\.jsonl:2: .* has no text"),
    "turn.jsonl": ('{"prompt": "a"}\n{"turns": "text"}', r"turn\.jsonl:2: .* has no text"),
    "number.jsonl": ('{"turns": [7]}', "has no text"),
    "question.jsonl": ('{"question": "a"}', "has no text"),
    "array.jsonl": ('["a"]', "has no text"),
    "torn.jsonl": ('{"prompt": "a"}\n{"prompt"', r"torn\.jsonl:2 is not JSON: .*one object per line"),
    "text.jsonl": ("text", r"text\.jsonl:1 is not JSON: .*one object per line, or one array"),
    "torn.json": ('[\n {"prompt": "a"},\n {"prompt"', r"torn\.json:1 is not JSON"),
    "image.jsonl": ('{"messages": [{"role": "user", "content": [{"image": 1}]}]}', r"image\.jsonl:1: .* has no text"),
    "mute.jsonl": ('{"messages": [{"content": "a"}]}', r"mute\.jsonl:1: .* has no text"),
    "list.json": ('[{"prompt": "a"}, {"prompt": 1}]', r"list\.json, row 2: .* has no text; write"),
    "silent.jsonl": ('{"turns": []}', r"silent\.jsonl is empty: no user says anything; name prompts or conversations"),
    "torn.parquet": ("PAR1", r"torn\.parquet: cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(name, tmp_path):
    content, says = REFUSED[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=says):
        read_conversations(tmp_path / name)


def test_missing_and_binary_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--prompts .*none\.jsonl: cannot be read .*No such file.*; give a JSONL"):
        read_prompts(tmp_path / "none.jsonl")
    (tmp_path / "wide.jsonl").write_bytes('{"prompt": "a"}'.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"wide\.jsonl: cannot be read .*utf-8.* in UTF-8"):
        read_prompts(tmp_path / "wide.jsonl")


def test_parquet_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r'parquet files need pyarrow; pip install "sglang-dspark\[train\]"'):
        read_prompts(tmp_path / "a.parquet")


def test_letters_of_two_halves_are_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"turns": ["日本 👨\u200d👩"]}) + "\n")
    assert "\\ud83d\\udc68" in path.read_text()
    assert read_prompts(path) == ["日本 👨\u200d👩"]


HALVES = [
    {"prompt": "\ud83d cat"},
    {"turns": ["One?", "red \ude00"]},
    {"messages": [{"role": "\ud83d", "content": "1"}, {"role": "user", "content": "One?"}]},
    {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "2\ud83d"}]},
    {"prompt": [{"type": "text", "text": "red "}, {"type": "text", "text": "\ude00"}]},
    {"prompt": "\ud83d\ud83d\ude00\ude00"},
]


def test_half_a_letter_is_read_as_a_replacement_character(tmp_path, caplog):
    """Cut chats of public data sets have such texts. JSON can hold them, UTF-8 and tokenizers cannot."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in HALVES))
    turns = [("\ufffd cat",), ("One?", "red \ufffd"), ("One?",), ("Two?",), ("red \ufffd",), ("\ufffd😀\ufffd",)]
    assert read_conversations(path) == turns
    says = (
        "--prompts {0}: in {1} of {2} rows a text has half of a surrogate pair, which is read as U+FFFD; the first is "
        "{0}:{3}"
    )
    assert [record.getMessage() for record in caplog.records] == [says.format(path, 4, 6, 1)]
    caplog.clear()
    assert read_answers(path) == ["2\ufffd"]
    assert [record.getMessage() for record in caplog.records] == [says.format(path, 1, 6, 4)]


def test_first_turns_each_once(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"turns": ["one", "two"]}, {"prompt": "three", "id": 1}, {"prompt": "one"}, {"turns": ["four"]}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(path) == ["one", "three", "four"]
    assert read_prompts(path, limit=2) == ["one", "three"]


def test_what_assistants_say(tmp_path):
    rows = [SHAREGPT, {"prompt": "One?"}, MESSAGES, {"turns": ["One?", "Two?"]}, ROLES, "no row", {"messages": []}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_answers(path) == ["1", "1"]


class Redirecting(FakeServer):
    """Leads elsewhere, and notes the keys that it is shown."""

    def __init__(self):
        super().__init__()
        self.keys = []

    def answer(self, path, headers, body):
        self.keys.append(headers["Authorization"])
        if path == "/first":
            raise NotOk(302, Location="/elsewhere")
        return {}


def test_a_key_does_not_follow_a_redirection():
    with Redirecting() as server:
        assert JsonClient("--url", server.url, "a", timeout_s=60, api_key="secret").request("/first") == {}
    assert server.keys == ["Bearer secret", None]


TOKENS = Tokens(20, special=frozenset({0, 19}), of_bytes=frozenset({12, 13}))


def test_the_order_in_which_tokens_are_taken():
    """Special ones, those of answers and of prompts by their number, bytes, and the tokenizer's first."""
    traffic = Traffic(answers=[[7, 7, 8], [9, 9, 9, 19]], prompts=[[5, 5, 5, 5, 5], [4]])
    order = [0, 19, 9, 7, 8, 5, 4, 12, 13, 1, 2, 3, 6]
    for size in range(3, len(order) + 1):
        assert traffic.choose(TOKENS, size) == sorted(order[:size])


def test_coverage_of_answers_that_were_not_counted():
    answers = [[place] for place in range(2, 11)] + [[2, 2, 11]]
    assert Traffic(answers).held_out_coverage(TOKENS, 12) == 2 / 3
    assert Traffic(answers[:9]).held_out_coverage(TOKENS, 12) is None
    assert coverage([2, 3], [[2, 3], [4, 2]]) == 3 / 4
    assert coverage([2, 3], [[]]) is None


def test_tokens_of_a_target(tmp_path):
    """The tokenizer has a token more than the target, which no drafter proposes."""
    tokenizer = AutoTokenizer.from_pretrained(save_byte_tokenizer(tmp_path, marks=("<turn>",), beyond=("<beyond>",)))
    tokenizer.chat_template = "<turn>{{ messages[0].content }}<beyond>"
    tokens = Tokens.of(tokenizer, TARGET)
    assert (tokens.number, tokens.special) == (256, {0, 1, 2, 255})
    assert tokens.of_bytes == {*range(3, 255)}


def test_tokens_of_rounds():
    entries = [{"anchor": 5, "draft": [6, 7, 8], "accepted": 2}, None, None, {"anchor": 9, "draft": [], "accepted": 0}]
    assert Answer(entries, 5, stopped=True).tokens == [5, 6, 7, 9]
