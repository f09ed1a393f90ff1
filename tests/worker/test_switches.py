"""Every switch of the network in the served stages: what is drafted is what the literal float64 drafter drafts."""

import json
import shutil

import pytest
import torch
from dspark_kernels import kernels_anywhere
from literal_draft import LiteralDraft
from safetensors.torch import load_file, save_file
from stage_loop import StageLoop
from switched_drafter import switched_drafter
from switches import SWITCHES

from sglang_dspark.draft.weights import load_draft_model

V, NUM_TOKENS = 7, 16
PROMPT = [1, 4, 4, 0, 6, 2, 5, 3, 1, 1, 6]  # the windows are narrower
PROPOSED = [1, 2, 4, 6]
GENERATOR = torch.Generator().manual_seed(7)
LOGITS = torch.randn((V, V, V), generator=GENERATOR)  # by the last two tokens
STATES = torch.randn((V, V, 3 * 24), generator=GENERATOR)


def target(ids):
    """Logits [n, V] and tapped states [n, taps * d]; each depends on the token and its predecessor."""
    before, last = torch.tensor([0, *ids[:-1]]), torch.tensor(ids)
    return LOGITS[before, last], STATES[before, last]


class SwitchLoop(StageLoop):
    """Serves a random drafter beside that target."""

    def __init__(self, folder):
        model = load_draft_model(folder, dtype=torch.float32, device="cpu")
        self._set_up(model, target, None, {"schedule": "static"})


def written(folder, kind):
    """A checkpoint with these switches; returns ``folder``."""
    return switched_drafter(folder, kind, proposed=PROPOSED, vocab_size=V)


def own_text(num_tokens):
    """Return the text that the target writes without any drafts."""
    text = list(PROMPT)
    while len(text) < len(PROMPT) + num_tokens:
        text.append(int(target(text)[0][-1].argmax()))
    return text[len(PROMPT) :]


def check_trace(folder, num_tokens):
    loop, literal = SwitchLoop(folder), LiteralDraft(folder)
    drafted = set()
    assert loop.serve([PROMPT], num_tokens) == [own_text(num_tokens)]
    for start, anchor, drafts, kept in loop.traces[0]:
        features = target(loop.texts[0][:start])[1].double()
        expected = literal.draft(features, anchor)[0]
        assert drafts == expected
        following = loop.texts[0][start + 1 :]
        assert drafts[:kept] == following[:kept]
        assert kept == len(drafts) or drafts[kept] != following[kept]
        drafted.add(tuple(drafts))
    assert len(drafted) > 1


@pytest.mark.parametrize("name", SWITCHES)
def test_greedy_traces_are_the_literal_drafters(name, tmp_path):
    check_trace(written(tmp_path, name), NUM_TOKENS)


FLIPS = {
    "layout": ("layout of DFlash with heads", {"sample_from_anchor": True}),
    "window of the anchor that slides": ("window from the anchor", {"window_from_anchor": False}),
    "window of the slot that does not": ("window from the slot", {"window_from_anchor": True}),
    "a row more of the context": ("window from the anchor", {"sliding_window": 4}),
    "the slot not counted": ("window from the slot", {"sliding_window": 4}),
    "the slot counted twice": ("window from the slot", {"sliding_window": 2}),
    "windows of the wrong layers": (
        "window from the slot",
        {"layer_types": ["sliding_attention", "full_attention"], "causal_layers": [False, False]},
    ),
    "a block that looks ahead": ("causal block", {"causal_layers": [False, False]}),
    "causality of the wrong layer": ("causal block", {"causal_layers": [False, True]}),
    "no YaRN": ("YaRN", {"rope_parameters": {"rope_theta": 500.0}}),
    "another original length": (
        "YaRN",
        {"rope_parameters": SWITCHES["YaRN"]["rope_parameters"] | {"original_max_position_embeddings": 64}},
    ),
    "no linear RoPE": ("linear RoPE", {"rope_parameters": {"rope_theta": 500.0}}),
    "no RoPE of Llama 3": ("Llama 3's RoPE", {"rope_parameters": {"rope_theta": 500.0}}),
    "all pairs rotate": ("some pairs rotate", {"rope_parameters": {"rope_theta": 500.0}}),
    "no biases": ("biases", {"attention_bias": False}),
    "no sinks": ("sinks", {"sink_layers": [False, False]}),
    "no value scale": ("value scale", {"attention_value_scale": 1.0}),
    "no softcap": ("softcap", {"final_logit_softcapping": None}),
}


@pytest.mark.parametrize(("name", "flip"), FLIPS.values(), ids=FLIPS.keys())
def test_a_convention_that_is_flipped_changes_drafts_and_no_text(name, flip, tmp_path):
    """The same tensors read another way: what the traces above would find, and what users would not see."""
    (tmp_path / "straight").mkdir()
    straight = written(tmp_path / "straight", name)
    flipped = shutil.copytree(straight, tmp_path / "flipped")
    content = json.loads((flipped / "config.json").read_text()) | flip
    (flipped / "config.json").write_text(json.dumps(content))
    kept = {
        key: tensor
        for key, tensor in load_file(flipped / "model.safetensors").items()
        if not ("_proj.bias" in key and "self_attn" in key and not content["attention_bias"])
        and not ("attention_sink_bias" in key and not any(content["sink_layers"]))
    }
    save_file(kept, flipped / "model.safetensors")
    loops = [SwitchLoop(folder) for folder in (straight, flipped)]
    texts = [loop.serve([PROMPT], NUM_TOKENS) for loop in loops]
    assert texts[0] == texts[1] == [own_text(NUM_TOKENS)]
    assert loops[0].traces != loops[1].traces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DFlash", "window from the slot, causal", "everything"])
def test_kernels_draft_the_same(name, tmp_path):
    with kernels_anywhere():
        check_trace(written(tmp_path, name), 5)
