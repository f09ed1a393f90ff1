"""Tests of conversations, prompts and texts: every turn is answered by the target, in process or by a server."""

import json
import shutil
from copy import deepcopy
from pathlib import Path

import datasets
import pytest
import torch
from dspark_training.conversations import read_conversations
from dspark_training.corpus import TextFolder
from dspark_training.prompt_format import PromptFormat
from dspark_training.settings import TextPlan
from dspark_training.target import Target
from dspark_training.texts import Text
from dspark_training.writers import InProcessWriter, ServerWriter
from fake_server import FakeServer, NotOk
from transformers import AutoTokenizer

from sglang_dspark.errors import ConfigError, DSparkError

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "target"
# Of the words that the golden tokenizer has.
TEMPLATE = """{% for m in messages %}{{ "if" if m.role == "user" else "then" }} {{ m.content }} . {% endfor %}\
{% if add_generation_prompt %}the{% endif %}"""
STOP = 1
NOUNS = "cat dog bird fish tree river".split()


@pytest.fixture(scope="module")
def prompt_format(tmp_path_factory):
    path = tmp_path_factory.mktemp("golden") / "target"
    shutil.copytree(GOLDEN, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return PromptFormat(AutoTokenizer.from_pretrained(path))


class Answering:
    """Answers "red stone", and is cut short where it was asked about a fish; keeps what it was asked."""

    stop_ids = frozenset({STOP})
    batch = 2

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.asked = []

    def write(self, prompts, temperatures, max_new_tokens, seed):
        said = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.asked += zip(said, temperatures, strict=True)
        answer = self.tokenizer(" red stone", add_special_tokens=False)["input_ids"]
        return [
            Text(torch.tensor([*prompt, *answer, *([] if "fish" in text else [STOP])]), len(prompt))
            for prompt, text in zip(prompts, said, strict=True)
        ]


@pytest.fixture
def talks(tmp_path):
    path = tmp_path / "talks.jsonl"
    rows = [
        {"conversations": [{"from": role, "value": f"{noun} {turn}"} for turn in turns for role in ("human", "gpt")]}
        for noun, turns in zip(NOUNS, [("1",), ("1", "2"), *[("1", "2", "3")] * 4], strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def written(folder, plan, prompt_format):
    writer = Answering(prompt_format.tokenizer)
    texts = TextFolder(folder, plan, frozenset())
    texts.write(texts.read_prompts(), writer, prompt_format, lambda *progress: None)
    return texts.load(), writer


def test_every_turn_follows_what_the_target_wrote_itself(prompt_format, talks, tmp_path):
    plan = TextPlan(prompts=(str(talks),), held_out=2, temperatures=(0.0, 0.7))
    texts, writer = written(tmp_path / "corpus", plan, prompt_format)
    decode = prompt_format.tokenizer.decode
    prompts = [decode(row.input_ids[: row.prompt_len]) for row in texts.train + texts.greedy]
    expected = []
    for noun, turns in zip(NOUNS, (1, 2, 3, 1, 3, 3), strict=True):  # an answer about a fish does not end
        said = ""
        for turn in ("1", "2", "3")[:turns]:
            said += f"if {noun} {turn} . "
            expected.append(said + "the")
            said += "then red stone . "
    words = [" ".join(prompt.split()) for prompt in prompts]
    assert sorted(words) == sorted(expected)
    assert {decode(row.input_ids[row.prompt_len :]).split()[:2] == ["red", "stone"] for row in texts.train} == {True}
    # A conversation keeps its temperature.
    heats = {}
    for prompt, heat in writer.asked:
        heats.setdefault(next(noun for noun in NOUNS if noun in prompt), set()).add(heat)
    assert sorted(map(sorted, heats.values())) == [[0.0], [0.0], [0.0, 1.0], [0.0, 1.0], [0.7], [0.7]]
    assert len(texts.sampled) == len(texts.greedy) > 2
    # Nothing is written twice.
    _, idle = written(tmp_path / "corpus", plan, prompt_format)
    assert idle.asked == []


def test_turns_and_prompts_can_be_limited(prompt_format, talks, tmp_path):
    plan = TextPlan(prompts=(str(talks),), held_out=1, max_turns=2, max_prompts=4)
    texts, _ = written(tmp_path / "few", plan, prompt_format)
    rows = [json.loads(line) for line in (tmp_path / "few" / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and max(len(row["turns"]) for row in rows) == 2
    longest = max(row.prompt_len for row in texts.train)
    short, _ = written(
        tmp_path / "short",
        TextPlan(prompts=(str(talks),), held_out=1, max_prompt_tokens=longest - 1, max_turns=2),
        prompt_format,
    )
    assert all(row.prompt_len < longest for row in short.train)
    assert len(short.train) >= 5


def test_nothing_to_train_on_begins_as_a_held_out_conversation(prompt_format, tmp_path):
    """Data sets hold the same first turn in several conversations."""
    path = tmp_path / "alike.jsonl"
    talks = [[f"{noun} 1", f"{noun} {n}"] for noun in NOUNS for n in "234"]
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in talks))
    plan = TextPlan(prompts=(str(path),), held_out=2)
    written(tmp_path / "corpus", plan, prompt_format)
    rows = [json.loads(line) for line in (tmp_path / "corpus" / "prompts.jsonl").read_text().splitlines()]
    apart, trained = ([row["turns"] for row in rows if row["held_out"] is kind] for kind in (True, False))
    assert len(apart) == 2 and len(trained) >= 3 * (len(NOUNS) - 2)
    assert not {first for first, _ in apart} & {first for first, _ in trained}
    path.write_text("".join(json.dumps({"turns": ["cat 1", f"cat {n}"]}) + "\n" for n in "234"))
    with pytest.raises(ConfigError, match=r"--held-out 2: of 3 prompts.* begins otherwise"):
        written(tmp_path / "none", plan, prompt_format)


def test_an_interrupted_stage_goes_on_after_the_last_whole_line(prompt_format, talks, tmp_path):
    plan = TextPlan(prompts=(str(talks),), held_out=2)
    whole, _ = written(tmp_path / "corpus", plan, prompt_format)
    path = tmp_path / "corpus" / "train-2.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:9])
    again, writer = written(tmp_path / "corpus", plan, prompt_format)
    assert path.read_text().splitlines(keepends=True) == lines
    assert len(writer.asked) == len(lines) - 1
    assert [text.input_ids.tolist() for text in again.train] == [text.input_ids.tolist() for text in whole.train]


def test_options_that_differ_from_those_of_the_texts_are_refused(prompt_format, talks, tmp_path):
    plan = TextPlan(prompts=(str(talks),), held_out=2, max_tokens=12)
    written(tmp_path / "corpus", plan, prompt_format)
    with pytest.raises(ConfigError, match=r"--max-tokens 13: the texts in \S+ were begun with 12; drop the option"):
        TextFolder(tmp_path / "corpus", TextPlan(max_tokens=13), frozenset({"max_tokens"}))
    assert TextFolder(tmp_path / "corpus", TextPlan(max_tokens=13), frozenset()).plan == plan


FORMAT_STOP = frozenset({1})
# Turns end with another token (<mask>) than answers (<eos>).
FORMAT_TEMPLATE = (
    "{% for m in messages %}<pad> {{ m.content }} <mask> {% endfor %}"
    "{% if add_generation_prompt %}the {% if quiet %}quiet {% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN)
    tokenizer.chat_template = FORMAT_TEMPLATE
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
    assert "the" + prompt_format.invented_turn([*ids(tokenizer, "red cat"), *FORMAT_STOP], FORMAT_STOP) == "the red cat"


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
    assert PromptFormat(tokenizer).invented_turn(ids(tokenizer, written), FORMAT_STOP) == turn


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


class TokenServer(FakeServer):
    """Answers ``[7, 8, ..., STOP]``, one token per token of the prompt; `cut` leaves the stop token out."""

    cut, first_token = False, 7

    def answer(self, path, headers, body):
        if body["input_ids"] == [9, 9]:
            raise NotOk(400, "no such luck")
        output = [self.first_token + i for i in range(len(body["input_ids"]))] + [STOP] * (not self.cut)
        return {"output_ids": output, "meta_info": {"finish_reason": {"type": "stop", "matched": STOP}}}


@pytest.fixture
def server():
    with TokenServer() as server:
        yield server


def write(server, prompts, temperatures, **options):
    writer = ServerWriter(server.url + "/", frozenset({STOP}), 64, concurrency=2, **options)
    return writer.write(prompts, temperatures, 20, 0)


@pytest.mark.parametrize("cut", [False, True])
def test_token_ids_go_in_and_come_out_in_order(server, cut):
    server.cut = cut
    rows = write(server, [[3], [4, 5], [6, 6, 6]], [0.0, 1.0, 0.7])
    assert [row.input_ids.tolist() for row in rows] == [[3, 7, 1], [4, 5, 7, 8, 1], [6, 6, 6, 7, 8, 9, 1]]
    assert [row.prompt_len for row in rows] == [1, 2, 3]


def test_what_the_server_is_asked(server):
    write(server, [[3], [4]], [0.0, 0.7], api_key="secret")
    asked = {
        body["input_ids"][0]: (path, sent["Authorization"], body["sampling_params"])
        for path, sent, body in server.requests
    }
    everything = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "stop_token_ids": [STOP], "max_new_tokens": 20}
    assert asked[3] == ("/generate", "Bearer secret", everything | {"temperature": 0.0})
    seed = asked[4][2].pop("sampling_seed")
    assert asked[4] == ("/generate", "Bearer secret", everything | {"temperature": 0.7})
    write(server, [[3], [4]], [0.0, 0.7])
    assert {seed} == {body["sampling_params"].get("sampling_seed", seed) for _, _, body in server.requests[2:]}


def test_a_refused_prompt_ends_the_stage(server):
    with pytest.raises(DSparkError, match=r"(?s)/generate: HTTP 400: .*no such luck"):
        write(server, [[9, 9]], [0.0])


def test_tokens_that_are_not_the_targets(server):
    server.first_token = 64
    with pytest.raises(ConfigError, match="below the target's vocab_size=64; check that the server serves"):
        write(server, [[3]], [0.0])


PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 33, 41], [60, 4], [12, 13, 14, 15, 16]]


def greedy_alone(target, prompt, max_new_tokens):
    """Greedy continuation of one prompt, the whole text run again for every token."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_texts_in_process_are_those_of_each_prompt_alone(target, batch):
    """Some end early, at different steps; a penalty that the checkpoint suggests changes nothing."""
    free = [greedy_alone(target, prompt, 12) for prompt in PROMPTS]
    model = deepcopy(target.model)
    model.generation_config.update(eos_token_id=[free[0][5], free[2][6]], repetition_penalty=5.0)
    stopping = Target(model, target.tap_ids)
    counted = []
    writer = InProcessWriter(stopping, batch=batch, on_progress=counted.append)
    texts = writer.write(PROMPTS, [0.0] * 4, 12, seed=1)
    expected = [greedy_alone(stopping, prompt, 12) for prompt in PROMPTS]
    assert [text.input_ids.tolist() for text in texts] == expected
    assert min(len(ids) - len(prompt) for ids, prompt in zip(expected, PROMPTS, strict=True)) < 12
    assert sum(counted) == 4


def test_sampled_tokens_follow_the_distribution_of_the_target(target):
    prompt = PROMPTS[1]
    probs = torch.softmax(target.model(torch.tensor([prompt])).logits[0, -1] / 0.7, dim=-1)
    texts = InProcessWriter(target, batch=4000).write([prompt] * 4000, [0.7] * 4000, 1, seed=3)
    counts = torch.bincount(torch.tensor([int(text.input_ids[-1]) for text in texts]), minlength=64)
    # Half the L1 distance of 4000 draws to their own distribution is about 0.4 * sqrt(64 / 4000) = 0.05 at most.
    assert float((counts / 4000 - probs).abs().sum() / 2) < 0.06
