"""One backend encodes prompts and another verifies; servers run without SGLang's graphs of prefill also."""

import ast
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt import layers
from sglang.srt.layers.attention import hybrid_attn_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dspark.engine.feature import Part
from sglang_dspark.engine.forward import stock_graphs
from sglang_dspark.engine.forward.verify_attention import PhasedBackend, as_without_dspark
from sglang_dspark.engine.launch.flag_checks import KNOWN_BY, SINKS
from sglang_dspark.engine.scheduler import worker_base
from sglang_dspark.worker.worker import DSparkWorker


@pytest.mark.parametrize(
    ("backend", "module", "name"),
    [
        ("fa3", "flashattention", "FlashAttentionBackend"),
        ("flashinfer", "flashinfer", "FlashInferAttnBackend"),
        ("triton", "triton", "TritonAttnBackend"),
        ("torch_native", "torch_native", "TorchNativeAttnBackend"),
    ],
)
def test_which_backends_know_attention_sinks(backend, module, name):
    """SGLang's own take them as an argument; not all of these can be imported without a GPU."""
    [folder] = layers.attention.__path__
    tree = ast.parse((Path(folder) / f"{module}_backend.py").read_text())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    [attends] = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "forward_extend"]
    assert ("sinks" in [argument.arg for argument in attends.args.args]) == (backend in KNOWN_BY[SINKS])


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
    runner = SimpleNamespace(
        attn_backend=stock,
        kv_cache_dtype=torch.float32,
        token_to_kv_pool=None,
        req_to_token_pool=None,
        kv_index_translator=None,
        model_config=SimpleNamespace(context_len=8),
        server_args=SimpleNamespace(speculative_attention_mode=mode),
        prefill_attention_backend_str="stock",
    )
    monkeypatch.setattr(hybrid_attn_backend, "get_spec", lambda: runner.server_args)
    runner.attn_backend = backend = PhasedBackend(runner, runner.attn_backend, ours)
    for forward_mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        batch = SimpleNamespace(forward_mode=forward_mode)
        backend.init_forward_metadata(batch)
        backend.forward(torch.zeros(1), None, None, None, batch)
    assert stock.laid_out == stock.attended == [ForwardMode.EXTEND]
    assert ours.laid_out == ours.attended == [ForwardMode.TARGET_VERIFY]
    assert not backend.needs_cpu_seq_lens
    assert (backend.prefill_attention_backend_str, backend.decode_attention_backend_str) == ("stock", "spy")
    # Gemma masks pictures if this one is of the right class.
    with as_without_dspark(runner):
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
    monkeypatch.setattr(stock_graphs, "check_cuda_graph_backend", lambda phase, backend: backend == chosen)
    with get_parallel().override(tp_size=ranks), caplog.at_level(logging.WARNING):
        if expected is None:
            with pytest.raises(RuntimeError, match="out of memory"):
                stock_graphs.prefill_graphs(lambda **given: original(), model_runner=None, eager_runner="eager")
            return
        made = stock_graphs.prefill_graphs(
            lambda **given: SimpleNamespace(runner=original()), model_runner=None, eager_runner="eager"
        )
    assert made.runner == expected and re.search(warning, caplog.text)
    assert bool(warning) == bool(caplog.records)


@pytest.mark.parametrize("is_prefill", [True, False])
def test_features_prepare_for_a_batch_before_its_forward(is_prefill, monkeypatch):
    """SGLang's own worker would do so for batches that it is handed; it is handed a forward."""
    awaited = []

    class Waiting(Part):
        def batch_comes(self, batch):
            awaited.append("batch")

        def prefill_comes(self, batch):
            awaited.append("prefill")

    def forward(*args):
        raise InterruptedError(f"made after {awaited}")

    worker = object.__new__(DSparkWorker)
    worker._target_worker = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=None))
    worker.schedule = SimpleNamespace(invalidate=lambda: None)
    worker.parts = [Waiting(), Part()]
    worker.decode = forward
    worker._target_worker.forward_batch_generation = lambda **given: forward()
    monkeypatch.setattr(worker_base, "capturing_forward", lambda *given: None)
    mode = SimpleNamespace(is_extend=lambda: is_prefill, is_idle=lambda: False)
    batch = SimpleNamespace(
        reqs=[], forward_mode=mode, is_extend_in_batch=False, return_logprob=False, is_prefill_only=False
    )
    expected = "'batch', 'prefill'" if is_prefill else "'batch'"
    with pytest.raises(InterruptedError, match=rf"made after \[{expected}\]"):
        worker._run(batch, None)


def test_features_change_the_logits_of_first_tokens_and_look_at_these(monkeypatch):
    seen = []

    class Looking(Part):
        def first_logits(self, batch, logits):
            logits[:, 4] = 7.0

        def first_tokens(self, batch, tokens):
            seen.append(tokens.tolist())

        def tokens_drawn(self, batch, output, drawn):
            return [*output, drawn.tokens.tolist(), drawn.indptr.tolist()] if isinstance(output, list) else [output]

    worker = object.__new__(DSparkWorker)
    worker._target_worker, worker.device, worker.step = SimpleNamespace(random_seed=1), torch.device("cpu"), 1
    worker.check_logits, worker.agreement = None, SimpleNamespace(adopt=lambda *tensors: None)
    worker.sampling = SimpleNamespace(read=lambda reqs: SimpleNamespace(filter_params=SimpleNamespace(temperatures=1)))
    worker.parts = [Looking(), Looking()]
    monkeypatch.setattr(worker_base, "round_keys", lambda *given, **named: None)
    monkeypatch.setattr(worker_base, "draw", lambda logits, rows, keys: logits.argmax(-1))
    req = Req("r", "", [0], SamplingParams())
    batch = SimpleNamespace(reqs=[req], has_grammar=False, return_logprob=False, seq_lens=torch.tensor([3]))
    output = SimpleNamespace(next_token_logits=torch.zeros(1, 9))
    worker._draw_first(batch, result := SimpleNamespace(logits_output=output))
    assert seen == [[4], [4]] and result.logits_output == [output, [4], [0, 1]]


@pytest.mark.parametrize("pictures", [True, False])
def test_a_drafter_reads_pictures_as_they_are_embedded(pictures, monkeypatch):
    ids, embedded, states = torch.tensor([3, 4]), torch.randn(2, 3), torch.randn(2, 6)
    output = SimpleNamespace(mm_input_embeds=embedded if pictures else None, hidden_states=states)
    result = SimpleNamespace(logits_output=output, next_token_ids=torch.tensor([5]))
    injected, remembered, seen = [], [], []

    class Seeing(Part):
        def prefill_done(self, batch):
            seen.append(list(remembered))

    worker = object.__new__(DSparkWorker)
    worker.parts = [Seeing()]
    worker.remember = lambda *rows: remembered.append(rows)
    worker._target_worker = SimpleNamespace(
        model_runner=SimpleNamespace(attn_backend=None, model_config=SimpleNamespace(model_is_mrope=False)),
        forward_batch_generation=lambda **given: result,
    )
    worker.inject_context = lambda *rows: injected.append(rows)
    forward = SimpleNamespace(input_ids=ids, positions=torch.arange(2))
    monkeypatch.setattr(worker_base, "capturing_forward", lambda *given: forward)
    batch = SimpleNamespace(is_prefill_only=True, seq_lens=torch.tensor([2]), out_cache_loc=torch.tensor([7, 8]))
    worker._prefill(batch, lambda lens: None)
    [(rows, captured, *_)] = injected
    assert rows is (embedded if pictures else ids) and captured is states
    assert remembered == [(ids, batch.out_cache_loc)] and seen == [remembered]
    assert output.mm_input_embeds is None
