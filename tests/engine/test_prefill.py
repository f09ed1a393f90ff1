"""One backend encodes prompts and another verifies; servers run without SGLang's graphs of prefill also."""

import logging
import re

import pytest
import torch
from made_schedule import schedule
from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
from sglang.srt.runtime_context import get_parallel
from sglang_objects import ONE_RANK, batch, forward, model_config, partly, request, runner, server_args

from sglang_dspark.engine import graphs, worker_base
from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.batch import SamplingReader
from sglang_dspark.engine.part import LogitsPart, Part
from sglang_dspark.engine.verify import PhasedBackend, as_without_dspark
from sglang_dspark.worker.worker import DSparkWorker


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
def test_prompts_go_to_one_backend_and_verification_to_the_other(mode, monkeypatch):
    """Whatever ``--speculative-attention-mode`` says, and no length is read back in a decode step."""
    stock, ours = Spy(), Spy()
    target = runner(
        **dict.fromkeys(("token_to_kv_pool", "req_to_token_pool", "kv_index_translator")),
        attn_backend=stock,
        kv_cache_dtype=torch.float32,
        model_config=model_config(context_len=8),
        server_args=server_args(speculative_attention_mode=mode),
        prefill_attention_backend_str="stock",
    )
    monkeypatch.setattr(hybrid_attn_backend, "get_spec", lambda: target.server_args)
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
        (Backend.BREAKABLE, failing, 1, "eager", "prefill without CUDA graphs.*out of memory"),
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
    worker.inject_context = lambda *rows: injected.append(rows)
    worker.remember = lambda *rows: seen.append(rows)
    worker.logits_parts, worker.encoder = [Noting(seen), LogitsPart(), Noting(seen)], None
    worker.parts = [*worker.logits_parts, Part()]
    monkeypatch.setattr(worker_base, "capturing_forward", lambda *given: rows)
    lens, slots = torch.tensor([2]), torch.tensor([7, 8])
    given = batch(request(top_k=1), forward_mode=mode, seq_lens=lens, req_pool_indices=lens, out_cache_loc=slots)
    worker._run(given, lambda lens: None)
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
