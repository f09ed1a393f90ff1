"""Tests of what is taken from a target: whole tensors of ranks that hold parts, and two backends of attention.

Servers also run without SGLang's graphs of prefill.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.runtime_context import get_context, get_parallel
from sglang_objects import ONE_RANK, batch, forward, model_config, partly, request, runner
from step_tables import schedule

from sglang_dspark.draft.config import EMBEDDING_TAP, DraftConfig
from sglang_dspark.draft.formats import read_config
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.engine import graphs, worker_base
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import SamplingReader
from sglang_dspark.engine.part import LogitsPart, Part
from sglang_dspark.engine.target import Target
from sglang_dspark.engine.verify import PhasedBackend, as_without_dspark
from sglang_dspark.errors import CheckpointError
from sglang_dspark.worker.worker import DSparkWorker

DRAFT_DIR = Path(__file__).parents[1] / "data" / "golden" / "vanilla_g7"
DRAFT = read_config(DRAFT_DIR)
ROWS_PER_RANK = 160  # of a vocabulary of 256, padded to 320
layer = partial(partly, torch.nn.Module)


class TwoRanks:
    """A tensor-parallel group as rank 0 sees it; ``others`` are what rank 1 contributes, in order."""

    world_size = 2

    def __init__(self, *others: torch.Tensor) -> None:
        self._others = list(others)

    def all_gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([part, self._others.pop(0)], dim)


def target_of(embedding: Any, head: Any, draft: DraftConfig = DRAFT, group: Any = ONE_RANK) -> Target:
    """The handle of a target with these layers."""
    model = partly(Qwen3ForCausalLM, get_input_embeddings=lambda: embedding, lm_head=head)
    known = {"dtype": torch.float32, "kv_cache_dtype": torch.float32, "spec_aux_config": SpecAuxHiddenStateConfig()}
    target = runner(model_config=model_config(quantization="fp8"), model=model, **known)
    with get_parallel().override(tp_group=group, tp_size=group.world_size):
        return Target(target, draft)


@pytest.mark.parametrize("tied", [True, False])
def test_the_drafter_reads_whole_matrices(tied):
    embedding, head = (torch.randn(2 * ROWS_PER_RANK, DRAFT.hidden_size) for _ in range(2))
    head = embedding if tied else head
    layers = [layer(weight=whole[:ROWS_PER_RANK]) for whole in (embedding, head)]
    group = TwoRanks(embedding[ROWS_PER_RANK:], head[ROWS_PER_RANK:])
    target = target_of(layers[0], layers[0] if tied else layers[1], group=group)
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    drafter.embed_tokens = drafter.lm_head = None  # as in a checkpoint that leaves them out
    assert target.share_with(drafter) == ("embed_tokens.weight", "lm_head.weight")
    assert drafter.embed_weight.equal(embedding[: DRAFT.vocab_size])
    assert drafter.lm_head_weight.equal(head[: DRAFT.vocab_size])
    assert (drafter.embed_weight.data_ptr() == drafter.lm_head_weight.data_ptr()) == tied


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced vocabulary"])
def test_whole_matrices_follow_a_target_in_place(reduced):
    """Those of two ranks are copies, so are the rows of a reduced vocabulary; captured graphs read where they lie."""
    before, after = (torch.randn(2 * ROWS_PER_RANK, DRAFT.hidden_size) for _ in range(2))
    part = layer(weight=before[:ROWS_PER_RANK])
    target = target_of(part, part, group=TwoRanks(before[ROWS_PER_RANK:], after[ROWS_PER_RANK:]))
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    drafter.embed_tokens = drafter.lm_head = None
    if reduced:
        drafter.token_ids = torch.tensor([3, 5, 8])
    target.share_with(drafter)
    read = drafter.embed_weight, drafter.lm_head_weight
    part.weight = after[:ROWS_PER_RANK]
    drafter.follow_target(*target.weights(drafter))
    assert drafter.embed_weight is read[0] and drafter.lm_head_weight is read[1]
    assert read[0].equal(after[: DRAFT.vocab_size])
    assert read[1].equal(after[[3, 5, 8]] if reduced else after[: DRAFT.vocab_size])


PLAIN = torch.nn.Linear(DRAFT.hidden_size, 320, bias=False).half()  # of a vocabulary of 256
UNREADABLE = {
    "codes": layer(weight=torch.zeros(320, DRAFT.hidden_size, dtype=torch.int8)),
    "eight-bit floats": layer(weight=torch.zeros(320, DRAFT.hidden_size).to(torch.float8_e4m3fn)),
    "turned": layer(weight=torch.zeros(DRAFT.hidden_size, 320)),
    "packed under another name": layer(qweight=torch.zeros(16, 320, dtype=torch.int32)),
    "packed for AMX": layer(weight=PLAIN.weight.data, use_intel_amx_backend=True),
}


def share(embedding: Any, head: Any, *, own: bool) -> tuple[Any, tuple[str, ...]]:
    """A drafter and what it reads of a target with these layers."""
    drafter = load_draft_model(DRAFT_DIR, dtype=torch.float32, device="cpu")
    if not own:
        drafter.embed_tokens = drafter.lm_head = None
    return drafter, target_of(embedding, head).share_with(drafter)


@pytest.mark.parametrize("head", UNREADABLE.values(), ids=UNREADABLE)
def test_a_head_that_is_quantised_is_not_read(head):
    drafter, shared = share(PLAIN, head, own=True)
    assert shared == () and drafter.lm_head is not None
    drafter.embed_tokens = None
    with pytest.raises(CheckpointError, match=r"no lm_head.weight of its own, and the target's lm_head is (qua|pac)"):
        share(PLAIN, head, own=False)


def test_each_layer_is_decided_by_itself():
    """A quantised embedding next to a head that is not, and one that is both."""
    codes = UNREADABLE["codes"]
    drafter, shared = share(codes, PLAIN, own=True)
    assert shared == () and drafter.embed_weight is drafter.embed_tokens.weight
    with pytest.raises(CheckpointError, match=r"no embed_tokens.weight of its own"):
        share(codes, PLAIN, own=False)
    assert share(codes, codes, own=True)[1] == ()


def test_the_drafter_reads_layers_below_their_adapters():
    """Whose forms are known only of them; an adapter's embedding is laid out for the rows of a forward."""

    def adapted(below):
        return layer(weight=below.weight, base_layer=below)

    assert share(adapted(PLAIN), adapted(PLAIN), own=False)[1] == ("embed_tokens.weight", "lm_head.weight")
    with pytest.raises(CheckpointError, match="is packed for AMX"):
        share(adapted(PLAIN), adapted(UNREADABLE["packed for AMX"]), own=False)
    embedding = torch.nn.Embedding(256, DRAFT.hidden_size)
    with_embedding = replace(DRAFT, target_layer_ids=(EMBEDDING_TAP, *DRAFT.target_layer_ids))
    target = target_of(adapted(embedding), None, with_embedding)
    ids, captured = torch.tensor([5, 6]), torch.zeros(2, 3 * DRAFT.hidden_size)
    assert target.features(ids, captured)[:, : DRAFT.hidden_size].equal(embedding(ids))
    # Rows of pictures have no ids, and bring what they are embedded as.
    embedded = torch.randn(2, DRAFT.hidden_size)
    assert target.features(embedded, captured).equal(torch.cat([embedded, captured], dim=1))


class Spy(AttentionBackend):
    """Notes the modes that it is asked for."""

    def __init__(self):
        self.laid_out, self.attended = [], []
        self.prefill_attention_backend_str = self.decode_attention_backend_str = "spy"
        self.kv_index_translator = None

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.laid_out.append(forward_batch.forward_mode)

    def forward(self, q=None, k=None, v=None, layer=None, forward_batch=None, save_kv_cache=True, **kwargs):
        self.attended.append(forward_batch.forward_mode)
        return q


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_prompts_go_to_one_backend_and_verification_to_the_other(mode):
    """Whatever ``--speculative-attention-mode`` says, and no length is read back in a decode step."""
    stock, ours = Spy(), Spy()
    target = runner(
        **dict.fromkeys(("token_to_kv_pool", "req_to_token_pool", "kv_index_translator")),
        attn_backend=stock,
        kv_cache_dtype=torch.float32,
        model_config=model_config(context_len=8),
        prefill_attention_backend_str="stock",
    )
    with get_context().override_server_args(speculative_attention_mode=mode):
        target.attn_backend = backend = PhasedBackend(target, stock, ours)
    for forward_mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        backend.init_forward_metadata(rows := forward(forward_mode))
        backend.forward(torch.zeros(1), None, None, None, rows)
    assert stock.laid_out == stock.attended == [ForwardMode.EXTEND]
    assert ours.laid_out == ours.attended == [ForwardMode.TARGET_VERIFY]
    assert not backend.needs_cpu_seq_lens
    assert (backend.prefill_attention_backend_str, backend.decode_attention_backend_str) == ("stock", "spy")
    # Gemma masks pictures if this one is of the right class.
    with as_without_dspark(target):
        assert get_attn_backend() is stock


def failing():
    raise RuntimeError("out of memory")


def never():
    raise AssertionError


@pytest.mark.parametrize(
    ("chosen", "original", "ranks", "expected", "warning"),
    [
        (Backend.BREAKABLE, lambda: "graphs", 1, "graphs", ""),
        (Backend.DISABLED, lambda: "what SGLang does then", 1, "what SGLang does then", ""),
        (Backend.BREAKABLE, failing, 1, "eager", "prefill runs without CUDA graphs.*out of memory"),
        (Backend.BREAKABLE, failing, 2, None, ""),  # the other ranks wait for it at every size that they capture
        (Backend.TC_PIECEWISE, never, 1, "eager", "return no hidden states"),
    ],
    ids=["breakable", "disabled", "out of memory", "out of memory on a rank", "piecewise"],
)
def test_graphs_of_prefills(monkeypatch, caplog, chosen, original, ranks, expected, warning):
    monkeypatch.setattr(graphs, "check_cuda_graph_backend", lambda phase, backend: backend == chosen)
    with get_parallel().override(tp_size=ranks), caplog.at_level(logging.WARNING):
        if expected is None:
            with pytest.raises(RuntimeError, match="out of memory"):
                graphs.prefill_graphs(lambda **given: original(), model_runner=None, eager_runner="eager")
            return
        captured = {"memory_phase": "prefill", "memory_usage_gb": 0, "capture_time": 0}
        made = graphs.prefill_graphs(
            lambda **given: GraphCapture(runner=original(), **captured), model_runner=None, eager_runner="eager"
        )
    assert made.runner == expected and re.search(warning, caplog.text)
    assert bool(warning) == bool(caplog.records)


class Noting(LogitsPart):
    """Notes what a worker shows it, and changes the first logits."""

    def __init__(self, seen):
        self._seen = seen

    def batch_comes(self, batch):
        self._seen.append("batch")

    def prefill_comes(self, batch):
        self._seen.append("prefill")

    def first_logits(self, batch, logits):
        logits[:, 4] = 7.0

    def first_tokens(self, batch, tokens):
        self._seen.append(tokens.tolist())

    def tokens_drawn(self, batch, output, drawn):
        self._seen.append((drawn.tokens.tolist(), drawn.indptr.tolist()))
        return output

    def prefill_done(self, batch):
        self._seen.append("done")


def run(mode, output, rows, monkeypatch):
    """Return what the parts of a worker see while it runs a batch, among what it does itself, and its draft rows."""
    seen, injected = [], []

    def generate(**given):
        seen.append("forward")
        return GenerationBatchResult(logits_output=output)

    target = partly(TpModelWorker, _model_runner=runner(attn_backend=None, model_config=model_config()), random_seed=1)
    target.forward_batch_generation = generate
    worker = partly(DSparkWorker, _target_worker=target, device=torch.device("cpu"), step=1)
    worker.agreement, worker.sampling, worker.schedule = Agreement(ONE_RANK), SamplingReader("cpu"), schedule()
    worker.decode = lambda *given: seen.append("step")
    worker.drafter = SimpleNamespace(
        inject=lambda *rows: injected.append(rows), remember=lambda *rows: seen.append(rows)
    )
    worker.logits_parts, worker.encoder = [Noting(seen), LogitsPart(), Noting(seen)], None
    worker.parts = [*worker.logits_parts, Part()]
    monkeypatch.setattr(worker_base, "capturing_forward", lambda *given: rows)
    lens, slots = torch.tensor([2]), torch.tensor([7, 8])
    given = batch(request(top_k=1), forward_mode=mode, seq_lens=lens, req_pool_indices=lens, out_cache_loc=slots)
    worker.forward_batch_generation(given)
    return seen, injected


def test_features_prepare_for_a_step(monkeypatch):
    assert run(ForwardMode.DECODE, None, None, monkeypatch) == (["batch", "batch", "step"], [])


@pytest.mark.parametrize("pictures", [True, False])
def test_a_prefill(pictures, monkeypatch):
    """Features prepare before its forward, change the logits of the first tokens, and look at these and at the end.

    SGLang's own worker would have them prepare for batches that it is handed; it is handed a forward. A drafter reads
    pictures as they are embedded.
    """
    ids, embedded, states = torch.tensor([3, 4]), torch.randn(2, 3), torch.randn(2, 6)
    output = LogitsProcessorOutput(next_token_logits=torch.zeros(1, 9), hidden_states=states)
    output.mm_input_embeds = embedded if pictures else None
    seen, [(rows, captured, *_)] = run(
        ForwardMode.EXTEND, output, forward(input_ids=ids, positions=torch.arange(2)), monkeypatch
    )
    [remembered] = [entry for entry in seen if isinstance(entry, tuple) and entry[0] is ids]
    drawn = ([4], [0, 1])
    assert seen == [*["batch"] * 2, *["prefill"] * 2, "forward", [4], [4], drawn, drawn, remembered, "done", "done"]
    assert remembered[1].tolist() == [7, 8]
    assert rows is (embedded if pictures else ids) and captured is states and output.mm_input_embeds is None
