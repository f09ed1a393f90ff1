"""Golden replay: it passes on the recorded vectors, and it fails when anything that matters is changed."""

import json
import shutil

import torch
from golden_replay import load_golden, load_target, replay
from reference_decoding import decode_greedy
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.weights import load_draft_model


def test_every_recorded_value_is_reproduced(golden_dir):
    report = replay(golden_dir / "target", golden_dir / "vanilla_g7")
    assert report.mismatches == []
    assert report.checked == {
        "anchor": 61,
        "draft": 61,
        "accepted": 55,  # the last round of each case may be cut by the token limit
        "block_hidden": 36,
        "base_logits": 36,
        "logits": 36,
        "confidence_logits": 36,
    }


def test_the_reference_decodes_as_recorded(golden_dir):
    """It is what servers and the trainer are compared with."""
    golden = load_golden(golden_dir / "vanilla_g7")
    model = load_draft_model(golden_dir / "vanilla_g7", dtype=torch.float32, device="cpu")
    target = load_target(golden_dir / "target", model)
    for case in golden.cases[:2]:
        decoded = decode_greedy(
            model, target, case.prompt_ids, max_new_tokens=golden.max_new_tokens, stop_token_ids=golden.stop_token_ids
        )
        assert decoded.output_ids == case.output_ids
        assert [(r.start, r.anchor, r.block.tokens) for r in decoded.rounds] == [
            (r.start, r.anchor, r.draft) for r in case.rounds
        ]


def test_each_recorded_value_is_compared(golden_dir, tmp_path):
    """Replays the first two cases, which take well under a second."""
    draft = shutil.copytree(golden_dir / "vanilla_g7", tmp_path / "draft")
    content = json.loads((draft / "golden.json").read_text())
    del content["cases"][2:]
    rounds = content["cases"][1]["rounds"]
    rounds[2]["draft"][6] ^= 1
    rounds[3]["accepted"] ^= 1
    (draft / "golden.json").write_text(json.dumps(content))
    recorded = load_file(draft / "golden.safetensors")
    tensors = {key: tensor for key, tensor in recorded.items() if key.startswith(("c0.", "c1."))}
    tensors["c0.r5.base_logits"].view(-1)[3].add_(2e-4)
    tensors["c1.r0.block_hidden"].view(-1)[3].fill_(float("nan"))
    save_file(tensors, draft / "golden.safetensors")
    assert set(replay(golden_dir / "target", draft).mismatches) == {
        ("draft", 1, 2),
        ("accepted", 1, 2),  # the target does not accept the altered last draft
        ("accepted", 1, 3),
        ("base_logits", 0, 5),
        ("block_hidden", 1, 0),
    }
