"""Drafters that do not fit are named after a few rounds; one that fits is not.

The golden drafter predicts as well whatever it taps: wrong taps cannot be shown with it.
"""

import pytest
import torch
from golden_replay import lend_target, load_golden
from stage_loop import DATA, DRAFT, StageLoop
from transformers import AutoModelForCausalLM

from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.features.reports.counters import FirstDrafts
from sglang_dspark.features.reports.counters import fit_of as judged
from sglang_dspark.scheduling.online_calibration import Verdict


def randomise(tensors, seed):
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        if tensor.ndim == 2:
            tensor.data = torch.randn(tensor.shape, generator=generator) * tensor.data.std()


def fit_of(tokens, *, random_drafter=False, other_target=False, **options):
    """Return what is said of the golden pair, changed in one way, after some texts."""
    model = load_draft_model(DRAFT, dtype=torch.float32, device="cpu")
    network = AutoModelForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()
    if random_drafter:
        randomise(model.parameters(), seed=1)
    target = lend_target(network, model)
    if other_target:  # with the same embedding and LM head, which the drafter reads
        randomise(network.model.layers.parameters(), seed=2)
    loop, drafts = StageLoop.__new__(StageLoop), FirstDrafts()
    loop._set_up(model, target, None, options or {"schedule": "static"})
    learn = loop.schedule.observe

    def observe(record, running, accept_lens):
        drafts.count(record, running, accept_lens)
        learn(record, running, accept_lens)

    loop.schedule.observe = observe
    prompts = [case.prompt_ids[shift:] for case in load_golden(DRAFT).cases for shift in (0, 3)]
    loop.serve(prompts, tokens)
    return judged(drafts.counts)


# Under this policy the confidence head is asked, and whole blocks are verified all the same.
ASKING = {"schedule": "threshold", "confidence_threshold": 0.0}


@pytest.mark.parametrize("options", [{}, ASKING], ids=["head unheard", "head heard"])
def test_the_golden_pair_fits(options):
    fit = fit_of(48, **options)
    assert fit.verdict is Verdict.FITS
    assert fit.share > 0.5
    assert (fit.promised is None) == (not options)


@pytest.mark.parametrize(
    ("changed", "options"),
    [({"random_drafter": True}, ASKING), ({"other_target": True}, {})],
    ids=["random drafter, head heard", "other target, head unheard"],
)
def test_pairs_that_do_not_fit_are_named(changed, options):
    fit = fit_of(10, **changed, **options)
    assert fit.verdict is Verdict.MISFIT, fit.sentence
