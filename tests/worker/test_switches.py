"""Every switch of the network in the served stages: what is drafted is what the literal float64 drafter drafts."""

import pytest
import torch
from dspark_kernels import kernels_anywhere
from literal_draft import LiteralDraft
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DFlash", "window from the slot, causal", "everything"])
def test_kernels_draft_the_same(name, tmp_path):
    with kernels_anywhere():
        check_trace(written(tmp_path, name), 5)
