"""Linear layers on a CPU: every way computes the product, ways go by rows, copies follow the weights; the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels.attention import tiles
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from torch.nn.functional import linear

from sglang_dspark.engine import cpu_linear, same_bits
from sglang_dspark.engine.cpu_linear import (
    ROWS,
    HeadMethod,
    LinearLayers,
    LinearMethod,
    Way,
    Ways,
    copy_for_onednn,
    fastest_ways,
    onednn_linear,
    replace_linear,
)
from sglang_dspark.errors import ConfigError

COPIES = Ways([Way.COPY], same_bits=True)
UNCHANGED = Ways([Way.PYTORCH], same_bits=False)


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
    layers = LinearLayers([layer], Ways([Way.PYTORCH, Way.PYTORCH, Way.ONEDNN, Way.COPY], same_bits=False))
    for rows in (1, 2, 3, 4):
        layers.apply(layer, torch.randn(rows, 4), None)
    assert [rows for rows, _ in seen] == [2, 3, 4]
    assert seen[0][1] is layer.weight and seen[1][1].is_mkldnn and seen[2][1].is_mkldnn


def test_another_dtype_is_left_to_pytorch():
    layer = Layer(5, 4)
    layers = LinearLayers([layer], COPIES)
    with pytest.raises(RuntimeError, match="dtype"):  # PyTorch's own words
        layers.apply(layer, torch.randn(2, 4, dtype=torch.float64), None)


def test_copies_follow_the_weights():
    layer, x = Layer(6, 4), torch.randn(3, 4)
    layers = LinearLayers([layer], COPIES)
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
    layers, x = LinearLayers([head, other], COPIES), torch.randn(3, 4)
    assert len(made) == 1
    assert torch.equal(layers.apply(head, x, None), layers.apply(other, x, None))


def test_ways_are_known_for_every_number_of_rows():
    weights = [torch.randn(64, 48) for _ in range(3)]
    ways = fastest_ways(weights, may_copy=True, same_bits=False)
    assert len(ways.by_rows) in (1, ROWS[-1] + 1) and set(ways.by_rows) <= set(Way)
    assert Way.COPY not in fastest_ways(weights, may_copy=False, same_bits=False).by_rows


def test_what_onednn_cannot_compute_is_left_to_pytorch():
    ways = fastest_ways([torch.randn(8, 4, dtype=torch.float64)], may_copy=True, same_bits=False)
    assert set(ways.by_rows) == {Way.PYTORCH}


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
    args = SimpleNamespace(tp_size=ranks, dp_size=replicas, enable_dp_attention=False, enable_lora=False)
    return SimpleNamespace(model=model, model_config=config, server_args=args, dtype=torch.float32)


def test_a_small_target_stays_as_it_is(model):
    assert replace_linear(runner_of(model), [], OneRank(), same_bits=False) is None
    assert type(model.proj.quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize("full_precision_head", [False, True])
def test_layers_and_head_of_a_target_are_replaced(model, monkeypatch, full_precision_head):
    monkeypatch.setattr(cpu_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, **asked: COPIES)
    model.logits_processor.use_fp32_lm_head = full_precision_head
    quantised, x = model.quantised.quant_method, torch.randn(3, 8)
    expected = [linear(x, layer.weight) for layer in (model.proj, model.lm_head)]
    assert replace_linear(runner_of(model), [], OneRank(), same_bits=False) is not None
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
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, **asked: COPIES)
    layer, x = torch.nn.Linear(8, 5), torch.randn(2, 3, 8)
    expected = layer(x)
    layers = replace_linear(runner_of(model), [layer], OneRank(), same_bits=False)
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
        cpu_linear, "fastest_ways", lambda weights, may_copy, same_bits: allowed.append(may_copy) or UNCHANGED
    )
    replace_linear(runner_of(model, **processes), [], OneRank(), same_bits=False)
    assert allowed == [not processes]


def test_ways_that_gain_nothing_change_nothing(model, monkeypatch):
    monkeypatch.setattr(cpu_linear, "LEAST_BYTES", 0)
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, **asked: UNCHANGED)
    assert replace_linear(runner_of(model), [], OneRank(), same_bits=False) is None
    assert type(model.proj.quant_method) is UnquantizedLinearMethod


def by_rows(original):
    """Return a product whose last bits depend on how many rows there are, as MKL's do."""
    return lambda x, weight, bias=None: original(x, weight, bias) + (len(x) == 5) * 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_way_with_the_same_bits_is_found(dtype):
    torch.manual_seed(0)
    weights = [torch.randn(shape).to(dtype) for shape in ((96, 64), (64, 192), (300, 64))]
    ways = fastest_ways(weights, may_copy=True, same_bits=True)
    layer = Layer(96, 64)
    assert ways.same_bits and len(ways.by_rows) == 1
    layer.weight.data = weights[0]
    layers, x = LinearLayers([layer], ways), torch.randn(500, 64).to(dtype)
    whole = layers.apply(layer, x, None)
    for rows in (1, 2, 3, 5, 8, 13, 100):
        assert torch.equal(layers.apply(layer, x[-rows:], None), whole[-rows:])


def test_a_way_whose_bits_depend_on_the_rows_is_found_out(monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn_linear", by_rows(onednn_linear))
    monkeypatch.setattr(cpu_linear, "linear", by_rows(linear))
    for asked in (False, True):
        assert not fastest_ways([torch.randn(64, 48)], may_copy=True, same_bits=asked).same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fewer", "least"), [(2, 2), (3, 4), (4, 4)])
def test_few_rows_with_other_bits_are_padded(monkeypatch, dtype, fewer, least):
    """In 16 bits, another order of sums changes few results; oneDNN has one for single rows on some CPUs."""

    def otherwise(x, weight, bias=None):
        parts = zip(x.double().split(48, dim=1), weight.double().split(48, dim=1), strict=True)
        one, two, three = ((a @ b.T).float() for a, b in parts)
        return (one + (two + three) if len(x) < fewer else one + two + three).to(x.dtype)

    monkeypatch.setattr(cpu_linear, "linear", lambda x, weight, bias=None: otherwise(x, weight))
    layer = Layer(64, 144)
    layer.weight.data = layer.weight.data.to(dtype)
    ways = fastest_ways([layer.weight], may_copy=False, same_bits=True)
    while ways.by_rows != [Way.PYTORCH]:  # before it, this CPU's own ways are asked
        monkeypatch.setattr(cpu_linear, "dtype_of_copies", lambda dtype: None)
        ways = fastest_ways([layer.weight], may_copy=False, same_bits=True)
    assert ways == Ways([Way.PYTORCH], same_bits=True, least_rows=least)
    layers, x = LinearLayers([layer], ways), torch.randn(40, 144).to(dtype)
    whole = layers.apply(layer, x, None)
    assert torch.equal(torch.stack([layers.apply(layer, row, None) for row in x]), whole)
    assert layers.apply(layer, x[:0], None).shape == (0, 64)


def test_a_way_with_the_same_bits_may_cost_little(monkeypatch):
    """Unless the operator asks for it, in which case it may cost whatever it does."""
    seconds = {Way.PYTORCH: 1.0, Way.ONEDNN: 1.02, Way.COPY: 1.5}
    monkeypatch.setattr(cpu_linear, "median_seconds", lambda forms, rows: {way: seconds[way] for way in forms})
    monkeypatch.setattr(cpu_linear, "_least_rows", lambda weights, way: 1 if way is Way.ONEDNN else None)
    weights = [torch.randn(8, 4)]
    assert fastest_ways(weights, may_copy=True, same_bits=False) == Ways([Way.ONEDNN], same_bits=True)
    seconds[Way.ONEDNN] = 1.2
    assert fastest_ways(weights, may_copy=True, same_bits=False) == UNCHANGED
    assert fastest_ways(weights, may_copy=True, same_bits=True) == Ways([Way.ONEDNN], same_bits=True)


def module_of(kind):
    module = kind.__new__(kind)
    torch.nn.Module.__init__(module)
    return module


@pytest.fixture
def covered(model, monkeypatch):
    """A server all of whose layers give rows the same bits, and these layers."""
    monkeypatch.setattr(same_bits, "encodes_prompts", lambda runner: True)
    monkeypatch.setattr(cpu_linear, "fastest_ways", lambda weights, **asked: COPIES)
    runner = runner_of(model)
    return runner, replace_linear(runner, [], OneRank(), same_bits=True)


def test_a_server_says_that_its_bits_are_the_same(covered):
    for asked in (False, True):
        assert same_bits.same_bits(*covered, asked=asked)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda runner, layers: setattr(layers, "ways", UNCHANGED), "no way to compute linear layers"),
        (lambda runner, layers: setattr(runner.model, "experts", module_of(FusedMoE)), "computes experts,"),
        (lambda runner, layers: setattr(runner.model, "added", module_of(LinearBase)), "computes added,"),
        (lambda runner, layers: setattr(layers, "layers", layers.layers - {runner.model.lm_head}), "computes lm_head,"),
        (lambda runner, layers: setattr(runner.server_args, "tp_size", 3), "more than 2 ranks"),
        (lambda runner, layers: setattr(runner.server_args, "enable_dp_attention", True), "more than 2 ranks"),
        (lambda runner, layers: setattr(runner.server_args, "enable_lora", True), "an adapter"),
    ],
)
def test_what_may_give_other_bits_is_named(covered, fault, said):
    fault(*covered)
    assert not same_bits.same_bits(*covered, asked=False)
    with pytest.raises(ConfigError, match=f"--enable-deterministic-inference=True: .*{said}.*drop the flag"):
        same_bits.same_bits(*covered, asked=True)


def test_a_state_and_layers_of_pytorch_are_named(covered, monkeypatch):
    runner, layers = covered
    with pytest.raises(ConfigError, match="no way to compute linear layers"):
        same_bits.same_bits(runner, None, asked=True)
    monkeypatch.setattr(same_bits, "encodes_prompts", lambda runner: False)
    with pytest.raises(ConfigError, match="recurrent layers"):
        same_bits.same_bits(runner, layers, asked=True)


@pytest.mark.parametrize("function", [SiluAndMul, GeluAndMul])
def test_an_activation_whose_threads_share_rows_is_found_out(covered, function, monkeypatch):
    """As some numbers of threads do that this machine may not have."""
    runner, layers = covered
    runner.model.activation, runner.model.proj.weight.data = function(), torch.randn(5, 8)  # an odd width
    assert same_bits.same_bits(runner, layers, asked=True)
    monkeypatch.setattr(runner.model.activation, "_forward_method", lambda x: x + (len(x) == 3) * 1e-6)
    with pytest.raises(ConfigError, match="number of threads"):
        same_bits.same_bits(runner, layers, asked=True)


def test_attention_that_sums_in_another_order_is_found_out(covered, monkeypatch):
    """Keys that are padded by the length of a request, and not by the place of a tile."""
    runner, layers = covered
    attention = RadixAttention(6, 16, 16**-0.5, num_kv_heads=2, layer_id=0)
    runner.model.attention = attention
    assert same_bits.same_bits(runner, layers, asked=True)
    monkeypatch.setattr(tiles, "_MULTIPLE", 1)
    attention.tp_q_head_num = attention.tp_k_head_num
    with pytest.raises(ConfigError, match="PyTorch's attention"):
        same_bits.same_bits(runner, layers, asked=True)
