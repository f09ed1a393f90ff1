"""``convert``: what it writes is the same drafter in the canonical form, and it says what it did."""

import json

import format_exports as exports
import pytest
import torch
from canonical_drafter import config_json, proposed_tokens, random_tensors
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.formats import read
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools.cli import main

SWITCHES = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 4,
    "window_from_anchor": True,
    "causal_layers": [False, True],
    "sample_from_anchor": False,
    "draft_vocab_size": 6,
    "attention_bias": True,
}


def run(*arguments):
    return CliRunner().invoke(main, ["convert", *map(str, arguments)])


@pytest.fixture
def published(tmp_path):
    """A folder in the speculators format, of half precision, and its drafter's canonical tensors."""
    config = config_json(**SWITCHES)
    canonical = {name: t.bfloat16() for name, t in exports.without_embeddings(random_tensors(config, seed=0)).items()}
    content, tensors = exports.speculators(config, canonical)
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content | {"new_key": 1}))
    save_file(tensors | exports.reduced(proposed_tokens(6), 19), folder / "model.safetensors")
    return folder, canonical


def test_the_canonical_form_holds_the_same_drafter_bit_by_bit(tmp_path, published):
    folder, canonical = published
    result = run("--draft", folder, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for said in (
        "speculators",
        "5 slots of which the anchor's does not predict",
        "window of 4 rows before the anchor in layer 1",
        "causal block in layer 1",
        "heads for 6 of 19 tokens",
        "biases in the attention",
        "taps in ascending order",
        "new_key (left out)",
    ):
        assert said in result.output
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == canonical.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in canonical.items())
    again, source = read(tmp_path / "out"), read(folder)
    assert again.format == "DeepSpec" and again.unknown_keys == () and again.config == source.config
    models = [load_draft_model(path, dtype=torch.float32, device="cpu") for path in (folder, tmp_path / "out")]
    assert torch.equal(models[0].token_ids, models[1].token_ids)


def test_an_open_question_is_answered_on_the_command_line(tmp_path, published):
    folder, _ = published
    content = json.loads((folder / "config.json").read_text())
    del content["speculators_config"]
    (folder / "config.json").write_text(json.dumps(content))
    asked = run("--draft", folder, "--output", tmp_path / "out")
    assert asked.exit_code == 1 and "does the slot of the anchor predict?" in asked.output
    answered = run("--draft", folder, "--output", tmp_path / "out", "--set", "sample_from_anchor=true")
    assert answered.exit_code == 0, answered.output
    assert read(tmp_path / "out").config.sample_from_anchor


def test_bad_arguments_are_named(tmp_path, published):
    folder, _ = published
    assert f"--output={folder} holds files already" in run("--draft", folder, "--output", folder).output
    bad = run("--draft", folder, "--output", tmp_path / "out", "--set", "sample_from_anchor=maybe")
    assert bad.exit_code == 2 and "'sample_from_anchor=maybe' is not KEY=VALUE" in bad.output
