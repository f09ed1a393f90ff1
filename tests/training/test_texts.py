from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from dspark_training import corpus as corpus_module
from dspark_training.corpus import Corpus, generate
from dspark_training.texts import ComputedStates, keep_states, kept_bytes, stored_states
from dspark_training.writers import InProcessWriter

from sglang_dspark.errors import ConfigError

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


def test_kept_states_equal_those_computed_per_batch(target, tmp_path):
    generate_all(InProcessWriter(target), tmp_path)
    rows, seen = Corpus.load(tmp_path).rows, []
    kept = keep_states(target, rows, batch_tokens=8, on_progress=lambda *done: seen.append(done))
    assert seen[-1] == (3, 3) and len(seen) > 1
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(rows, kept, strict=True))
    stored, computed = stored_states(kept), ComputedStates(target)(rows)
    for i, row in enumerate(rows):
        before_last = slice(len(row.input_ids) - 1)
        for name in ("features", "last_hidden"):
            expected, found = getattr(computed, name)[i, before_last], getattr(stored, name)[i, before_last]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    tensors = [tensor for row in kept for tensor in (row.features, row.last_hidden)]
    assert sum(tensor.nbytes for tensor in tensors) == kept_bytes(target, rows)


def test_a_time_limit_ends_the_writing_between_two_shards(target, tmp_path, monkeypatch):
    times = iter(range(0, 1000, 10))
    monkeypatch.setattr(corpus_module, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    # Started at 0; the first shard begins at 10 and ends at 20; at 30 another 10 would be over the limit.
    generate_all(InProcessWriter(target), tmp_path, seconds=39)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-00000.safetensors"]
    generate_all(InProcessWriter(target), tmp_path, seconds=39)
    assert len(list(tmp_path.iterdir())) == 2
