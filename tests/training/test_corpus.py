"""Conversations: every turn is answered by the target, after its own answers to the turns before."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from dspark_training.corpus import TextFolder
from dspark_training.prompt_format import PromptFormat
from dspark_training.settings import TextPlan
from dspark_training.texts import Text
from transformers import AutoTokenizer

from sglang_dspark.errors import ConfigError

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
