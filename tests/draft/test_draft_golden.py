"""Golden replay: it passes on the recorded vectors, and it fails when anything that matters is changed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dspark.errors import CheckpointError
from sglang_dspark.tools.golden import replay


def test_every_recorded_value_is_reproduced(golden_dir):
    report = replay(golden_dir / "target", golden_dir / "vanilla_g7")
    assert report.mismatches == [] and report.ok
    assert report.checked == {
        "decoded.output_ids": 6,
        "decoded.rounds": 6,
        "decoded.start": 61,
        "decoded.anchor": 61,
        "decoded.draft": 61,
        "decoded.accepted": 55,  # the last round of each case may be cut by the token limit
        "taught.anchor": 61,
        "taught.draft": 61,
        "taught.accepted": 55,
        "taught.block_hidden": 36,
        "taught.base_logits": 36,
        "taught.logits": 36,
        "taught.confidence_logits": 36,
    }
    assert max(report.max_abs_error.values()) < 1e-4
    recorded = json.loads((golden_dir / "vanilla_g7" / "golden.json").read_text())
    assert report.accept_lengths == pytest.approx([case["accept_length"] for case in recorded["cases"]])


class Pair:
    """A writable copy of the golden pair, cut to its first two cases so that each replay takes well under a second."""

    def __init__(self, golden_dir, path):
        self.target, self.draft = golden_dir / "target", path / "draft"
        shutil.copytree(golden_dir / "vanilla_g7", self.draft)
        self.edit_json("golden.json", lambda content: content.update(cases=content["cases"][:2]))
        self.edit_tensors(
            "golden.safetensors", lambda t: [t.pop(key) for key in list(t) if not key.startswith(("c0.", "c1."))]
        )

    def edit_json(self, name, change):
        content = json.loads((self.draft / name).read_text())
        change(content)
        (self.draft / name).write_text(json.dumps(content))

    def edit_tensors(self, name, change):
        tensors = load_file(self.draft / name)
        change(tensors)
        save_file(tensors, self.draft / name)

    def replay(self):
        return replay(self.target, self.draft)


@pytest.fixture
def pair(golden_dir, tmp_path):
    return Pair(golden_dir, tmp_path)


def paths(report):
    return {mismatch.path for mismatch in report.mismatches}


def test_a_wrong_tap_is_found(pair):
    pair.edit_json("config.json", lambda c: c.update(target_layer_ids=[0, 2, 3]))
    report = pair.replay()
    assert not report.ok
    assert {"taught.draft", "decoded.draft", "taught.block_hidden", "taught.confidence_logits"} <= paths(report)
    # The drafts are wrong, yet the text stays the target's own.
    assert "decoded.output_ids" not in paths(report)


def test_markov_and_confidence_weights_are_checked_apart(pair):
    pair.edit_tensors("model.safetensors", lambda t: t["markov_head.markov_w2.weight"].mul_(1.01))
    report = pair.replay()
    assert "taught.logits" in paths(report)
    assert not {"taught.block_hidden", "taught.base_logits"} & paths(report)
    pair.edit_tensors("model.safetensors", lambda t: t["markov_head.markov_w2.weight"].div_(1.01))
    pair.edit_tensors("model.safetensors", lambda t: t["confidence_head.proj.bias"].add_(1e-3))
    assert paths(pair.replay()) == {"taught.confidence_logits"}


def test_a_missing_confidence_head_is_a_mismatch(pair):
    pair.edit_json("config.json", lambda c: c.update(enable_confidence_head=False))
    pair.edit_tensors("model.safetensors", lambda t: [t.pop(key) for key in list(t) if "confidence" in key])
    report = pair.replay()
    assert paths(report) == {"taught.confidence_logits"} and len(report.mismatches) == 12
    assert str(report.mismatches[0]) == "taught.confidence_logits (case 0 round 0): expected shape [7], got nothing"


def test_each_recorded_value_is_compared(pair):
    def change(content):
        rounds = content["cases"][1]["rounds"]
        rounds[2]["draft"][6] ^= 1
        rounds[3]["accepted"] ^= 1
        content["cases"][0]["output_ids"][-1] ^= 1

    recorded = json.loads((pair.draft / "golden.json").read_text())["cases"][1]["rounds"]
    pair.edit_json("golden.json", change)
    pair.edit_tensors("golden.safetensors", lambda t: t["c0.r5.base_logits"].view(-1)[3].add_(2e-4))
    pair.edit_tensors("golden.safetensors", lambda t: t["c1.r0.block_hidden"].view(-1)[3].fill_(float("nan")))
    report = pair.replay()
    where = {(m.path, m.case, m.round) for m in report.mismatches}
    assert where == {
        ("taught.draft", 1, 2),
        ("taught.accepted", 1, 2),  # the target does not accept the altered last draft
        ("decoded.draft", 1, 2),
        ("taught.accepted", 1, 3),
        ("decoded.accepted", 1, 3),
        ("decoded.output_ids", 0, None),
        ("taught.base_logits", 0, 5),
        ("taught.block_hidden", 1, 0),
    }
    draft = next(m for m in report.mismatches if m.path == "decoded.draft")
    assert draft.got == recorded[2]["draft"] and draft.expected[:6] == draft.got[:6]


def test_a_golden_directory_can_lie_elsewhere_and_without_tensors(pair, tmp_path):
    shutil.move(pair.draft / "golden.json", tmp_path / "golden.json")
    report = replay(pair.target, pair.draft, tmp_path)
    assert report.ok and not any("logits" in path for path in report.checked)


def test_malformed_golden_data_is_refused(pair):
    good = (pair.draft / "golden.json").read_text()
    for change, message in (
        (lambda c: c.pop("gamma"), "gamma"),
        (lambda c: c.update(gamma=6), "gamma=6, but .* drafts 7 tokens per block"),
        (lambda c: c.update(temperature=1.0), "temperature=1.0"),
        (lambda c: c["cases"][0]["rounds"][0].pop("anchor"), "anchor"),
        (lambda c: c["cases"][1]["rounds"].reverse(), "case 1 has round starts"),
        (lambda c: c["cases"].pop(), "tensor 'c1.r0"),
    ):
        pair.edit_json("golden.json", change)
        with pytest.raises(CheckpointError, match=message):
            pair.replay()
        (pair.draft / "golden.json").write_text(good)
    pair.edit_tensors("golden.safetensors", lambda t: t.update({"c0.r0.hidden": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"tensor 'c0.r0.hidden' belongs to no round"):
        pair.replay()
    (pair.draft / "golden.json").unlink()
    with pytest.raises(CheckpointError, match=r"golden.json: not golden data"):
        pair.replay()


def test_an_unfit_target_is_refused(pair, tmp_path):
    pair.edit_json("config.json", lambda c: c.update(num_target_layers=7))
    with pytest.raises(CheckpointError, match="num_target_layers=7, but the target has num_hidden_layers=6"):
        pair.replay()
    with pytest.raises(CheckpointError, match="transformers cannot load this as a target"):
        replay(tmp_path / "nothing", pair.draft)
