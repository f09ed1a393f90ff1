from dataclasses import dataclass, field

import pytest
import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.train.corpus import Corpus, generate
from sglang_dspark.train.rows import ComputedStates, stored_states
from sglang_dspark.train.text_writer import InProcessWriter

PROMPTS = ([3, 4, 5], [6, 7, 8, 9], [10, 11])


@dataclass
class CountingWriter:
    writer: InProcessWriter
    batches: list = field(default_factory=list)

    def write(self, prompts, *rest):
        self.batches.append(prompts)
        return self.writer.write(prompts, *rest)


def generate_all(writer, directory, **overrides):
    settings = {"max_new_tokens": 5, "batch_size": 2, "seed": 0} | overrides
    generate(writer, PROMPTS, [0.0, 0.0, 1.0], directory, **settings)


def test_shards_hold_text_and_states(target, tmp_path):
    generate_all(InProcessWriter(target, keep_states=True), tmp_path)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 2
    loaded = Corpus.load(tmp_path)
    assert [row.prompt_len for row in loaded.rows] == [3, 4, 2]
    for row in loaded.rows:
        states = target.forward(row.input_ids[None, :-1])
        torch.testing.assert_close(row.features[:-1], states.features[0], atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(row.last_hidden[:-1], states.last_hidden[0], atol=2e-4, rtol=2e-4)


def test_states_computed_per_batch_equal_the_stored_ones(target, tmp_path):
    generate_all(InProcessWriter(target, keep_states=True), tmp_path / "with")
    generate_all(InProcessWriter(target), tmp_path / "without")
    rows, bare = Corpus.load(tmp_path / "with").rows, Corpus.load(tmp_path / "without").rows
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(rows, bare, strict=True))
    stored, computed = stored_states(rows), ComputedStates(target)(bare)
    for i, row in enumerate(rows):
        before_last = slice(len(row.input_ids) - 1)
        for name in ("features", "last_hidden"):
            expected, found = getattr(stored, name)[i, before_last], getattr(computed, name)[i, before_last]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    with pytest.raises(TypeError, match="without states"):
        stored_states(bare)


def test_generation_continues_after_the_shards_that_exist(target, tmp_path):
    generate_all(InProcessWriter(target), tmp_path / "whole")
    generate_all(InProcessWriter(target), tmp_path / "resumed")
    (tmp_path / "resumed" / "shard-00001.safetensors").unlink()
    writer = CountingWriter(InProcessWriter(target))
    generate_all(writer, tmp_path / "resumed")
    assert len(writer.batches) == 1
    whole, resumed = Corpus.load(tmp_path / "whole"), Corpus.load(tmp_path / "resumed")
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(whole.rows, resumed.rows, strict=True))


def test_an_empty_corpus_is_named(tmp_path):
    with pytest.raises(ConfigError, match="holds no shard"):
        Corpus.load(tmp_path)


def test_generation_stops_after_the_shards_asked_for(target, tmp_path):
    generate_all(InProcessWriter(target), tmp_path, max_shards=1)
    assert len(list(tmp_path.glob("shard-*.safetensors"))) == 1
