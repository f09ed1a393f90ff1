import json

import pytest
import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.train import corpus as corpus_module
from sglang_dspark.train.corpus import Corpus, generate, read_prompts


@pytest.fixture
def chatty(target, monkeypatch):
    """The target with a chat template that maps letters to token ids."""
    monkeypatch.setattr(target, "chat_prompt", lambda text: [3 + ord(letter) - ord("a") for letter in text])
    return target


def generate_all(target, directory, prompts=("abc", "defg", "hi"), **overrides):
    settings = {"max_prompt_len": 10, "max_new_tokens": 5, "batch_size": 2, "seed": 0} | overrides
    generate(target, prompts, [0.0] * len(prompts), directory, **settings)


def test_shards_hold_text_and_states(chatty, tmp_path):
    generate_all(chatty, tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 2
    loaded = Corpus.load(tmp_path)
    assert [row.prompt_len for row in loaded.rows] == [3, 4, 2]
    for row in loaded.rows:
        states = chatty.forward(row.input_ids[None, :-1])
        torch.testing.assert_close(row.features[:-1], states.features[0], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(row.last_hidden[:-1], states.last_hidden[0], atol=2e-4, rtol=2e-4)


def test_generation_continues_after_the_shards_that_exist(chatty, tmp_path, monkeypatch):
    generate_all(chatty, tmp_path / "whole")
    generate_all(chatty, tmp_path / "resumed")
    (tmp_path / "resumed" / "shard-00001.safetensors").unlink()
    decoded = []
    decode = corpus_module.decode
    monkeypatch.setattr(
        corpus_module, "decode", lambda target, ids, *rest: decoded.append(ids) or decode(target, ids, *rest)
    )
    generate_all(chatty, tmp_path / "resumed")
    assert len(decoded) == 1
    whole, resumed = Corpus.load(tmp_path / "whole"), Corpus.load(tmp_path / "resumed")
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(whole.rows, resumed.rows, strict=True))


def test_long_prompts_are_left_out(chatty, tmp_path):
    generate_all(chatty, tmp_path, max_prompt_len=3)
    assert [row.prompt_len for row in Corpus.load(tmp_path).rows] == [3, 2]


def test_an_empty_corpus_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no shard"):
        Corpus.load(tmp_path)


def test_both_prompt_formats_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["one", "two"]}\n{"prompt": "three"}\n{"turns": ["four"]}\n', encoding="utf-8")
    assert read_prompts(path) == ["one", "three", "four"]
    assert read_prompts(path, limit=2) == ["one", "three"]


def test_a_prompt_line_without_a_known_key_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"question": "?"}) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts.jsonl:1 .*question"):
        read_prompts(path)


def test_generation_stops_after_the_shards_asked_for(chatty, tmp_path):
    generate_all(chatty, tmp_path, max_shards=1)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 1
