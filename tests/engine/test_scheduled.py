"""SGLang's own DSPARK under our schedule, without a server: rows, steps, and what is refused at start-up."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.config import DSparkConfig
from sglang_dspark.engine.scheduled.captured_rows import CapturedRows
from sglang_dspark.engine.scheduled.launch import ScheduledServer
from sglang_dspark.engine.scheduled.served import refuse_unserved
from sglang_dspark.engine.scheduled.step import ScheduledStep
from sglang_dspark.errors import ConfigError
from sglang_dspark.step.decision import PLAIN, StepDecision
from sglang_dspark.step.selection import FixedLength, TopK

CAPTURED = CapturedRows(window=8, tiers=(8, 16, 32), requests=4)
ALONE = SimpleNamespace(adopt=lambda *tensors: None)


def proposal(logits):
    """Return what the worker drafts: the block's tokens, and its confidences."""
    from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult, DraftProposal

    bs, gamma = logits.shape
    tokens = torch.arange(bs * gamma).view(bs, gamma)
    block = DraftBlockResult(tokens, None, torch.ones(bs, dtype=torch.bool), torch.ones(bs), greedy_draft=True)
    return DraftProposal(tokens, block, confidence=logits.sigmoid(), confidence_raw=logits)


def forecast(logits, bs, depth):
    return SimpleNamespace(survival=logits.sigmoid().cumprod(1), logits=logits)


def laid_out(decision, logits):
    step = ScheduledStep(decision, len(logits), CAPTURED)
    step.propose(lambda: proposal(logits), torch.arange(len(logits)), None)
    return step, step.lay_out(SimpleNamespace(predict=forecast), ALONE)


def test_rows_are_padded_to_the_next_tier():
    """On the device: nothing of a captured layout is known to the host."""
    lens = torch.tensor([1, 4, 6])
    layout = CAPTURED.lay_out(lens, 11)
    assert (layout.graph_num_tokens, layout.verify_lens_cpu) == (16, None)
    assert layout.qo_indptr_device.tolist() == [0, 1, 5, 11]
    assert CAPTURED.lay_out(lens, None).graph_num_tokens == 32
    assert CapturedRows(window=8).lay_out(lens, 11).graph_num_tokens == 11


def test_the_budget_goes_to_the_drafts_that_survive():
    logits = torch.full((3, 7), -9.0)
    logits[1] = 2.0
    logits[2, :2] = 9.0
    step, layout = laid_out(StepDecision(7, TopK(5)), logits)
    assert step.verify_lens.tolist() == [0, 3, 2]
    assert layout.verify_lens.tolist() == [1, 4, 3]
    assert step.num_rows == layout.graph_num_tokens == 8


def test_the_worker_is_not_told_confidences():
    """Its planner would choose by them, and its relay copy them to the host."""
    step = ScheduledStep(StepDecision(7, TopK(5)), 2, CAPTURED)
    told = step.propose(lambda: proposal(torch.zeros(2, 7)), torch.zeros(2, dtype=torch.int64), None)
    assert told.confidence is told.confidence_raw is None


def test_a_plain_step_drafts_nothing():
    def draft():
        raise AssertionError("a forward")

    step, sampling = ScheduledStep(PLAIN, 2, CAPTURED), SimpleNamespace(top_ks=torch.tensor([1, 40]))
    told = step.propose(draft, torch.tensor([4, 5]), sampling)
    assert told.draft_block.greedy_mask.tolist() == [True, False]  # of a batch, some may be sampled
    assert told.draft_block_ids[:, 0].tolist() == [4, 5]
    assert told.draft_block.draft_tokens.shape == (2, 7)
    assert step.lay_out(SimpleNamespace(), ALONE).verify_lens.tolist() == [1, 1]


def test_beyond_the_captured_requests_blocks_are_verified_whole():
    assert [CAPTURED.fit(requests) for requests in (1, 4, 5)] == [True, True, False]
    assert not CapturedRows(window=8, tiers=(8, 64), requests=4).fit(5)  # there are slots for four alone
    step, layout = laid_out(StepDecision(7, FixedLength()), torch.zeros(5, 7))
    assert layout is None
    assert (step.verify_lens.tolist(), step.num_rows) == ([7] * 5, 40)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"draft_free": True}, "draft-free"), ({"fallback": "target-only"}, "fallback")],
    ids=["draft-free", "fallback"],
)
def test_options_of_our_own_worker_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        ScheduledServer.before(SimpleNamespace(), DSparkConfig(engine="scheduled", **options))


def test_a_mode_of_whole_blocks_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "static")
    with pytest.raises(ConfigError, match="SGLANG_RAGGED_VERIFY_MODE=static"):
        ScheduledServer.before(SimpleNamespace(), DSparkConfig(engine="scheduled"))


def served(**found):
    """A worker that is served, but for what is found."""
    backend = SimpleNamespace(supports_ragged_verify_graph=True, decode_attention_backend_str="fa3")
    runner = {"mrope": False, "engram": None, "graphs": object(), "backend": backend} | found
    args = {
        "enable_lora": False,
        "enable_dp_attention": False,
        "nnodes": 1,
        "pp_size": 1,
        "disaggregation_mode": "null",
    }
    return SimpleNamespace(
        device="cuda",
        server_args=SimpleNamespace(**{name: found.get(name, value) for name, value in args.items()}),
        model_runner=SimpleNamespace(
            attn_backend=runner["backend"],
            decode_cuda_graph_runner=runner["graphs"],
            model_config=SimpleNamespace(model_is_mrope=runner["mrope"]),
            ngram_embedding_manager=SimpleNamespace(engram_hasher=runner["engram"]),
        ),
    )


UNIFORM = SimpleNamespace(supports_ragged_verify_graph=False, decode_attention_backend_str="triton")


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"backend": UNIFORM}, "triton"),
        ({"graphs": None}, "--disable-cuda-graph"),
        ({"mrope": True}, "three coordinates"),
        ({"engram": object()}, "n-gram"),
        ({"enable_lora": True}, "adapters"),
        ({"enable_dp_attention": True}, "data parallelism"),
        ({"nnodes": 2}, "nodes"),
        ({"pp_size": 2}, "pipeline"),
        ({"disaggregation_mode": "prefill", "graphs": None}, "prefill and decode"),
    ],
)
def test_what_it_would_verify_wrongly_is_refused(found, named, monkeypatch):
    monkeypatch.setattr("sglang_dspark.engine.scheduled.served.resolving_view", lambda args: args)
    refuse_unserved(served())
    with pytest.raises(ConfigError, match=named):
        refuse_unserved(served(**found))
