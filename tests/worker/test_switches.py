"""Every switch of the network in the served stages: what is drafted is what the literal float64 drafter drafts."""

import json

import pytest
import torch
from canonical_drafter import config_json, random_tensors
from dspark_kernels import kernels_anywhere
from literal_draft import LiteralDraft
from safetensors.torch import save_file
from stage_loop import StageLoop
from switches import SWITCHES

from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.draft.weights import load_draft_model

V, NUM_TOKENS = 7, 16
PROMPT = [1, 4, 4, 0, 6, 2, 5, 3, 1, 1, 6]  # the windows are narrower
PROPOSED = [1, 2, 4, 6]
GENERATOR = torch.Generator().manual_seed(7)
LOGITS = torch.randn((V, V, V), generator=GENERATOR)  # by the last two tokens
STATES = torch.randn((V, V, 3 * 24), generator=GENERATOR)
# Attention that looks hard at few rows and says much, or the switches would change next to nothing.
SPREAD = {"q_norm": 3, "k_norm": 3, "o_proj.weight": 3, "attention_sink_bias": 20}


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
    """A drafter of random weights with these switches; returns ``folder``."""
    config = config_json(vocab_size=V, **SWITCHES[kind])
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = len(PROPOSED)
        save_token_ids(folder / "draft_vocabulary.json", PROPOSED)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config, seed=5)
    for name in tensors:
        tensors[name] *= next((factor for part, factor in SPREAD.items() if part in name), 1)
    save_file(tensors, folder / "model.safetensors")
    return folder


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DFlash", "window from the slot, causal", "everything"])
def test_kernels_draft_the_same(name, tmp_path):
    with kernels_anywhere():
        check_trace(written(tmp_path, name), 5)
