"""Linear layers on a CPU: every way computes the product, ways go by rows, copies follow the weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch.nn.functional import linear

from sglang_dspark.engine import cpu_linear
from sglang_dspark.engine.cpu_linear import (
    ROWS,
    HeadMethod,
    LinearLayers,
    LinearMethod,
    Way,
    copy_for_onednn,
    fastest_ways,
    onednn_linear,
    replace_linear,
)


class Layer(torch.nn.Module):
    """A layer as SGLang makes it, with random weights."""

    def __init__(self, rows: int, columns: int, method: object = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns), requires_grad=False)
        self.quant_method = method or UnquantizedLinearMethod()


class OneRank:
    """Ranks that agree at once."""

    def share(self, value):
        return value


@pytest.mark.parametrize("stored", [lambda weight: weight, copy_for_onednn])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (65, 33), (576, 192), (193, 1000)])
@pytest.mark.parametrize("rows", [(1,), (2,), (9,), (2, 3)])
def test_onednn_computes_the_product(stored, shape, rows):
    torch.manual_seed(0)
    weight, x = torch.randn(shape), torch.randn(*rows, shape[1])
    for bias in (None, torch.randn(shape[0])):
        expected = linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(onednn_linear(x, stored(weight), bias).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_copies_of_16_bits(dtype):
    """Where the CPU has no instructions for the dtype, copies have float32; the result has the dtype of the rows."""
    torch.manual_seed(0)
    weight, x, bias = (torch.randn(shape).to(dtype) for shape in ((65, 33), (5, 33), (65,)))
    product = onednn_linear(x, copy_for_onednn(weight), bias)
    expected = linear(x.double(), weight.double(), bias.double())
    assert product.dtype == dtype
    torch.testing.assert_close(product.double(), expected, rtol=torch.finfo(dtype).eps, atol=0.05)


def test_the_number_of_rows_decides_on_the_way(monkeypatch):
    layer, seen = Layer(5, 4), []
    monkeypatch.setattr(cpu_linear, "onednn_linear", lambda x, weight, bias: seen.append((len(x), weight)))
    layers = LinearLayers([layer], [Way.PYTORCH, Way.PYTORCH, Way.ONEDNN, Way.COPY])
    for rows in (1, 2, 3, 4):
        layers.apply(layer, torch.randn(rows, 4), None)
    assert [rows for rows, _ in seen] == [2, 3]
    assert seen[0][1] is layer.weight and seen[1][1].is_mkldnn


def test_another_dtype_is_left_to_pytorch():
    layer = Layer(5, 4)
    layers = LinearLayers([layer], [Way.COPY] * 9)
    with pytest.raises(RuntimeError, match="dtype"):  # PyTorch's own words
        layers.apply(layer, torch.randn(2, 4, dtype=torch.float64), None)


def test_copies_follow_the_weights():
    layer, x = Layer(6, 4), torch.randn(3, 4)
    layers = LinearLayers([layer], [Way.COPY] * 9)
    before = layers.apply(layer, x, None)
    layer.weight.data.copy_(layer.weight * 2)
    torch.testing.assert_close(layers.apply(layer, x, None), before)
    layers.follow()
    torch.testing.assert_close(layers.apply(layer, x, None), before * 2)


def test_a_weight_of_two_layers_is_copied_once(monkeypatch):
    head, other, made = Layer(6, 4), torch.nn.Linear(4, 6, bias=False), []
    other.weight = head.weight
    copy = cpu_linear.copy_for_onednn
    monkeypatch.setattr(cpu_linear, "copy_for_onednn", lambda weight: made.append(weight) or copy(weight))
    layers, x = LinearLayers([head, other], [Way.COPY] * 9), torch.randn(3, 4)
    assert len(made) == 1
    assert torch.equal(layers.apply(head, x, None), layers.apply(other, x, None))


def test_ways_are_known_for_every_number_of_rows():
    ways = fastest_ways([torch.randn(64, 48) for _ in range(3)], may_copy=True)
    assert len(ways) == ROWS[-1] + 1 and set(ways) <= set(Way)
    assert Way.COPY not in fastest_ways([torch.randn(64, 48)], may_copy=False)


def test_what_onednn_cannot_compute_is_left_to_pytorch():
    assert set(fastest_ways([torch.randn(8, 4, dtype=torch.float64)], may_copy=True)) == {Way.PYTORCH}


@pytest.fixture
def model():
    """A target whose embedding is its LM head, and layers that are left to SGLang."""
    model = torch.nn.Module()
    model.embed_tokens = Layer(50, 8, UnquantizedEmbeddingMethod())
    model.conv1d = Layer(8, 4)
    model.conv1d.weight.data = model.conv1d.weight.data.unsqueeze(1)
    model.proj, model.quantised = Layer(8, 8), Layer(8, 8, object())
    model.router = Layer(8, 8).double()
    model.visual = torch.nn.ModuleList([Layer(8, 8)])
    model.lm_head = model.embed_tokens
    model.logits_processor = SimpleNamespace(use_fp32_lm_head=False)
    return model


def runner_of(model, *, ranks=1, replicas=1):
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    args = SimpleNamespace(tp_size=ranks, dp_size=replicas)
    return SimpleNamespace(model=model, model_config=config, server_args=args, dtype=torch.float32)


def test_a_small_target_stays_as_it_is(model):
    assert replace_linear(runner_of(model), [], OneRank()) is None
    assert type(model.proj.quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize("full_precision_head", [False, True])
def test_layers_and_head_of_a_target_are_replaced(model, monkeypatch, full_precision_head):
    monkeypatch.setattr(cpu_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, may_copy: [Way.COPY] * 9)
    model.logits_processor.use_fp32_lm_head = full_precision_head
    quantised, x = model.quantised.quant_method, torch.randn(3, 8)
    expected = [linear(x, layer.weight) for layer in (model.proj, model.lm_head)]
    assert replace_linear(runner_of(model), [], OneRank()) is not None
    assert type(model.proj.quant_method) is LinearMethod and model.quantised.quant_method is quantised
    for left in (model.conv1d, model.visual[0], model.router):
        assert type(left.quant_method) is UnquantizedLinearMethod
    head = model.lm_head.quant_method
    assert type(head) is (UnquantizedEmbeddingMethod if full_precision_head else HeadMethod)
    got = model.proj.quant_method.apply(model.proj, x), head.apply(model.lm_head, x)
    torch.testing.assert_close(list(got), expected)
    tokens = torch.tensor([3, 49])
    assert torch.equal(head.embedding(model.lm_head, tokens), model.lm_head.weight[tokens])


def test_layers_of_a_drafter_are_computed_likewise(model, monkeypatch):
    monkeypatch.setattr(cpu_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, may_copy: [Way.COPY] * 9)
    layer, x = torch.nn.Linear(8, 5), torch.randn(2, 3, 8)
    expected = layer(x)
    layers = replace_linear(runner_of(model), [layer], OneRank())
    torch.testing.assert_close(layer(x), expected)
    layer.weight.data.mul_(2)
    layers.follow()
    torch.testing.assert_close(layer(x), 2 * expected - layer.bias)


@pytest.mark.parametrize("processes", [{}, {"ranks": 2}, {"replicas": 2}])
def test_copies_of_all_ranks_and_replicas_fit_into_their_share(model, monkeypatch, processes):
    weights = (model.proj.weight, model.lm_head.weight)
    room = SimpleNamespace(total=16 * sum(weight.nbytes for weight in weights))
    allowed = []
    monkeypatch.setattr(cpu_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(cpu_linear.psutil, "virtual_memory", lambda: room)
    monkeypatch.setattr(
        cpu_linear, "fastest_ways", lambda weights, may_copy: allowed.append(may_copy) or [Way.PYTORCH] * 9
    )
    replace_linear(runner_of(model, **processes), [], OneRank())
    assert allowed == [not processes]


def test_ways_that_gain_nothing_change_nothing(model, monkeypatch):
    monkeypatch.setattr(cpu_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, may_copy: [Way.PYTORCH] * 9)
    assert replace_linear(runner_of(model), [], OneRank()) is None
    assert type(model.proj.quant_method) is UnquantizedLinearMethod
