"""Quantised checkpoints of the tests: what SGLang's own layers hold, and near the weights that they were made of.

A GPU serves them: tests/gpu/test_targets.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from golden_server import CASES, TARGET
from quantised_target import CALIBRATED, GROUP, METHODS, is_quantised, quantised_target
from safetensors.torch import load_file
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.quantization import QUANTIZATION_METHODS, marlin_utils
from transformers import AutoModelForCausalLM

CHOSEN = {"modelopt": "modelopt_fp8", "awq": "awq_marlin", "gptq": "gptq_marlin"}  # on a GPU, by SGLang
KEY = "model.layers.1.mlp.down_proj"
WEIGHT = load_file(TARGET / "model.safetensors")[f"{KEY}.weight"]


@pytest.fixture(params=METHODS)
def checkpoint(request, tmp_path):
    """Name of the method, its configuration, and tensors of one layer."""
    folder = quantised_target(tmp_path, request.param)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = load_file(folder / "model.safetensors")
    assert not any(is_quantised(name) and stored[name].dtype == torch.float32 for name in stored)
    return request.param, config, {n.removeprefix(f"{KEY}."): t for n, t in stored.items() if n.startswith(KEY)}


def test_a_layer_holds_these_tensors(checkpoint, monkeypatch):
    """SGLang chooses a layer by what the GPU can; it makes its tensors on any device."""
    for module in (torch.cuda, marlin_utils):
        monkeypatch.setattr(module, "get_device_capability", lambda device=None: (9, 0))
    _, config, tensors = checkpoint
    read = QUANTIZATION_METHODS[CHOSEN.get(config["quant_method"], config["quant_method"])].from_config(dict(config))
    read.packed_modules_mapping = {}  # which weights a model has in one layer: its loader says it
    outputs, inputs = WEIGHT.shape
    layer = ReplicatedLinear(inputs, outputs, bias=False, params_dtype=torch.bfloat16, quant_config=read, prefix=KEY)
    held = dict(layer.named_parameters())
    assert {name: tuple(p.shape) for name, p in held.items()} == {n: tuple(t.shape) or (1,) for n, t in tensors.items()}
    for name in held.keys() - {"scales", "weight_scale"}:  # which are converted
        assert held[name].dtype == tensors[name].dtype


def test_a_quantised_layer_is_near_its_weights(checkpoint):
    name, _, tensors = checkpoint
    found = dequantised(name, tensors)
    largest = WEIGHT.abs().unflatten(1, (-1, GROUP)).amax(-1)
    error = (found - WEIGHT).abs().unflatten(1, (-1, GROUP)).amax(-1)
    four_bits = name in ("awq", "gptq", "compressed-tensors-int4")
    assert bool((error <= largest * (0.5 / 7 if four_bits else 2**-4) * 1.01).all())


@torch.no_grad()
def test_no_input_is_larger_than_the_fixed_scale_was_made_for():
    model, largest = AutoModelForCausalLM.from_pretrained(TARGET), []
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda module, inputs: largest.append(float(inputs[0].abs().max())))
    for case in CASES:
        model(torch.tensor([case["prompt_ids"] + case["output_ids"]]))
    assert 0 < max(largest) < CALIBRATED


def dequantised(name, tensors):
    """The weight [out, in] by the rule of its format, written out."""
    if name == "compressed-tensors-int4":
        codes = unpack_from_int32(tensors["weight_packed"], 4, torch.Size(tensors["weight_shape"].tolist()))
        return codes.float() * tensors["weight_scale"].repeat_interleave(GROUP, dim=1)
    if name in ("awq", "gptq"):
        scales, groups = tensors["scales"].float(), torch.arange(WEIGHT.shape[1]) // GROUP
        if name == "awq":
            order = (0, 4, 1, 5, 2, 6, 3, 7)  # where output i of eight lies
            codes, zeros = (unpacked(tensors[part], order, dim=1) for part in ("qweight", "qzeros"))
        else:
            assert tensors["g_idx"].tolist() == groups.tolist()
            codes = unpacked(tensors["qweight"], range(8), dim=0)
            zeros = unpacked(tensors["qzeros"], range(8), dim=1) + 1
        return ((codes - zeros[groups]) * scales[groups]).T
    return tensors["weight"].float() * tensors["weight_scale"]


def unpacked(words, order, dim):
    """Codes of four bits, eight to an int32, which follow each other along ``dim``."""
    codes = torch.stack([(words.long() >> (4 * place)) & 15 for place in order], dim=dim + 1)
    return codes.flatten(dim, dim + 1)
