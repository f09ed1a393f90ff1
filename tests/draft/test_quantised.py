"""Quantised drafters: weights are those of the library that wrote them, and what is unfit is refused by name."""

import json
from dataclasses import replace

import pytest
import torch
from canonical_drafter import proposed_tokens
from format_exports import DFLASH2
from quantised_drafter import FORMS, gguf_drafter, quantised_drafter
from safetensors.torch import load_file, save_file

from sglang_dspark.draft.formats import read
from sglang_dspark.draft.quantised import times_scales
from sglang_dspark.draft.weights import check_draft_model, load_draft_model
from sglang_dspark.errors import CheckpointError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}  # groups of 32 divide all widths
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def plain(make_checkpoint):
    """The folder of a drafter that is not quantised."""
    return make_checkpoint(**SIZES)


def weights(path, dtype):
    return dict(load_draft_model(path, dtype=dtype, device="cpu").named_parameters())


def assert_loads_to(path, expected):
    for dtype in DTYPES:
        loaded = weights(path, dtype)
        assert loaded.keys() == expected.keys()
        for name, parameter in loaded.items():
            assert torch.equal(parameter, expected[name].to(parameter.dtype)), name


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_library(plain, tmp_path, form):
    expected = quantised_drafter(plain, tmp_path / "quantised", form)
    check_draft_model(tmp_path / "quantised")
    assert_loads_to(tmp_path / "quantised", expected)
    exact, rounded = load_file(plain / "model.safetensors"), expected
    near = [float((rounded[name].float() - exact[name]).norm() / exact[name].norm()) for name in exact]
    assert 0 < max(near) < 0.4  # the codes mean the weights that were stored


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_a_gguf_file_is_the_drafter_that_was_converted(plain, tmp_path, kind):
    expected = gguf_drafter(plain, tmp_path / "draft.gguf", kind)
    assert_loads_to(tmp_path / "draft.gguf", expected)
    assert read(tmp_path / "draft.gguf").config.target_layer_ids == read(plain).config.target_layer_ids


def test_a_folder_with_one_gguf_file_is_that_file(plain, tmp_path):
    expected = gguf_drafter(plain, tmp_path / "draft.gguf")
    (tmp_path / "config.json").write_text("{}")  # as repositories have one next to the weights
    assert_loads_to(tmp_path, expected)
    gguf_drafter(plain, tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files, draft.gguf, other.gguf; give the path of one"):
        read(tmp_path)


def test_a_file_that_has_changed_is_read_again(plain, make_checkpoint, tmp_path):
    gguf_drafter(plain, tmp_path / "draft.gguf")
    weights(tmp_path / "draft.gguf", torch.float32)
    expected = gguf_drafter(make_checkpoint(seed=1, **SIZES), tmp_path / "draft.gguf", "Q4_0")
    assert_loads_to(tmp_path / "draft.gguf", expected)


METADATA = {
    "slots without the anchor's": ({"sample_from_anchor": False}, {"sample_from_anchor": False}),
    "no word of slots": ({"sample_from_anchor": None}, {"sample_from_anchor": True}),
    "head size by the number of heads": ({"attention.key_length": None}, {"head_dim": 8}),
    "causal": ({"attention.causal": True}, {"causal_layers": (True, True)}),
    "window": (
        {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False]},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4, "window_from_anchor": False},
    ),
    "a part of the channels": ({"rope.dimension_count": 4}, {"partial_rotary_factor": 0.5}),
    "softcap": ({"final_logit_softcapping": 8.0}, {"final_logit_softcapping": 8.0}),
    "vocabulary": ({"vocab_size": 19}, {"vocab_size": 19}),
    "multiplier": ({"logit_scale": 2.0}, {"output_multiplier": 2.0}),
}


@pytest.mark.parametrize(("metadata", "values"), METADATA.values(), ids=METADATA)
def test_metadata_say_what_config_json_does(plain, tmp_path, metadata, values):
    gguf_drafter(plain, tmp_path / "draft.gguf", metadata=metadata)
    reading = read(tmp_path / "draft.gguf")
    assert {key: getattr(reading.config, key) for key in values} == values
    assert [remark.doubtful for remark in reading.remarks] == ([True] if "attention.sliding_window" in metadata else [])


def test_dflash_2_in_a_gguf_file(make_checkpoint, tmp_path):
    source = make_checkpoint(**SIZES | DFLASH2)
    expected = gguf_drafter(source, tmp_path / "draft.gguf")
    assert_loads_to(tmp_path / "draft.gguf", expected)
    found, original = read(tmp_path / "draft.gguf").config, read(source).config
    unsaid = {"num_target_layers": None, "num_anchors": None, "rms_norm_eps": found.rms_norm_eps}  # a float32
    assert found == replace(original, **unsaid)


def test_yarn_is_read_from_metadata(plain, tmp_path):
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    gguf_drafter(plain, tmp_path / "draft.gguf", metadata=yarn | {"attention.novelty": 3})
    reading = read(tmp_path / "draft.gguf")
    scaling = reading.config.rope_scaling
    assert (scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 64)
    assert reading.unread_keys == ("dflash.attention.novelty",)


def test_tokens_of_a_reduced_vocabulary_are_the_same(make_checkpoint, tmp_path):
    tokens = torch.tensor(proposed_tokens(9))
    source = make_checkpoint(draft_vocab_size=9, add={"d2t": tokens - torch.arange(9)}, **SIZES)
    gguf_drafter(source, tmp_path / "draft.gguf")
    model = load_draft_model(tmp_path / "draft.gguf", dtype=torch.float32, device="cpu")
    assert torch.equal(model.token_ids, tokens)
    assert torch.equal(model.token_ids, load_draft_model(source, dtype=torch.float32, device="cpu").token_ids)


REFUSED_METADATA = {
    "another network": ({"architecture": "dflash-draft"}, r"architecture 'dflash-draft'; GGUF files that load are"),
    "a selector of another kind": ({"metadata": {"selector_rank": 8}}, r"selector_top_k=None contradicts"),
    "no taps": ({"metadata": {"target_layers": None}}, r"target_layer_ids=\(\) must hold"),
    "no layers": ({"metadata": {"block_count": None}}, r"key 'num_hidden_layers' is missing"),
    "another type of taps": ({"metadata": {"target_layers": "all"}}, r"cannot be read as GGUF"),
    "a layer less": ({"metadata": {"block_count": 3}}, r"missing layers.2.input_layernorm.weight"),
    "a tensor of no other": ({"metadata": {"feed_forward_length": 96}}, r"misshapen layers.0.mlp.down_proj.weight"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED_METADATA.values(), ids=REFUSED_METADATA)
def test_gguf_files_of_other_networks_are_refused(plain, tmp_path, change, message):
    gguf_drafter(plain, tmp_path / "draft.gguf", **change)
    with pytest.raises(CheckpointError, match=rf"draft\.gguf: .*{message}"):
        check_draft_model(tmp_path / "draft.gguf")


@pytest.mark.parametrize("kept", [0, 3, 40, 300, 900, -40, -4000])
def test_a_damaged_gguf_file_is_named(plain, tmp_path, kept):
    file = tmp_path / "draft.gguf"
    gguf_drafter(plain, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"draft\.gguf: cannot be read as GGUF .*; download it again"):
        read(file)


def damaged(folder, change):
    """Change the stored tensors, or the configuration, of a quantised drafter."""
    file, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change(tensors, config.get("quantization_config"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    (folder / "config.json").write_text(json.dumps(config))


UP = "layers.0.mlp.up_proj"


def without(part):
    return lambda tensors, config: tensors.pop(f"{UP}.{part}")


def replaced(part, make):
    return lambda tensors, config: tensors.update({f"{UP}.{part}": make(tensors.get(f"{UP}.{part}"))})


def configured(**keys):
    return lambda tensors, config: config.update(keys)


def of_weights(**keys):
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(keys)


UNFIT = {
    "no scale": ("fp8 by blocks", without("weight_scale_inv"), rf"missing {UP}.weight_scale or weight_scale_inv"),
    "only a scale": ("fp8", without("weight"), rf"missing {UP}.weight\."),
    "other blocks": (
        "fp8 by blocks",
        configured(weight_block_size=[16, 16]),
        rf"the scales \[3, 2\] of {UP}.weight \[64, 32\] are neither one .* \(of this configuration: 16 x 16\)",
    ),
    "blocks of nothing": ("fp8 by blocks", configured(weight_block_size=[0, 16]), r"weight_block_size=\[0, 16\] is no"),
    "scales by column": ("fp8", replaced("weight_scale_inv", lambda _: torch.ones(1, 32)), rf"\[1, 32\] of {UP}"),
    "packed without shape": ("pack-quantized", without("weight_shape"), rf"missing {UP}.weight_shape"),
    "no scale of scales": (
        "nvfp4-pack-quantized",
        without("weight_global_scale"),
        rf"missing {UP}.weight_global_scale",
    ),
    "codes for another shape": (
        "pack-quantized",
        replaced("weight_shape", lambda _: torch.tensor([64, 40])),
        rf"misshapen {UP}.weight_packed \[64, 4\]",
    ),
    "odd groups": ("pack-quantized", of_weights(group_size=24), r"group_size=24 does not divide the 32 columns of"),
    "other groups": ("pack-quantized", of_weights(group_size=32), rf"misshapen {UP}.weight_scale \[64, 2\], expected"),
    "by row in a vector": (
        "int-quantized",
        replaced("weight_scale", lambda scale: scale[:, 0]),
        rf"misshapen {UP}.weight_scale \[64\], expected \[64, 1\]",
    ),
    "ignored and quantised": ("int-quantized", configured(ignore=[UP]), rf"{UP} is quantised, but .* ignores it"),
    "no groups": ("int-quantized", configured(config_groups={}), r"is quantised, but .* names no group of it"),
    "no such group": ("int-quantized", configured(config_groups=[3]), r"is none of compressed-tensors \(.*config.json"),
    "rotated": ("int-quantized", configured(transform_config={"config_groups": {"R1": {}}}), r"transform_config or"),
    "sparse": ("int-quantized", configured(sparsity_config={"format": "sparse-24-bitmask"}), r"or sparsity_config"),
    "another method": ("fp8", configured(quant_method="awq"), r"quant_method='awq' is not read; methods that load are"),
    "another algorithm": (
        "fp8",
        configured(quant_method="modelopt", quant_algo="W4A16_AWQ"),
        r"quant_method='modelopt' with quant_algo=W4A16_AWQ is not read",
    ),
    "scaled inputs": ("fp8", replaced("pre_quant_scale", lambda _: torch.ones(32)), rf"{UP}.pre_quant_scale scales"),
    "weights next to scales": (
        "int-quantized",
        replaced("weight", torch.Tensor.float),
        rf"{UP}.weight has scales, and is not quantised itself",
    ),
    "codes of no matrix": (
        "nvfp4-pack-quantized",
        replaced("weight_packed", lambda _: torch.tensor(1, dtype=torch.uint8)),
        rf"misshapen {UP}.weight_packed \[\]",
    ),
    "an older format": ("pack-quantized", configured(format="marlin-24"), r"format='marlin-24' of .* is not read"),
    "no pattern": ("int-quantized", configured(ignore=["re:("]), r"is none of compressed-tensors \(missing \)"),
    "no such preset": (
        "int-quantized",
        configured(config_groups={"W3X": ["Linear"]}),
        r"is none of compressed-tensors",
    ),
    "quantised K/V": ("fp8", replaced("k_scale", lambda _: torch.ones(1)), rf"{UP}.k_scale is for a quantised K/V"),
}


@pytest.mark.parametrize(("form", "change", "message"), UNFIT.values(), ids=UNFIT)
def test_what_is_unfit_is_refused_by_name_before_weights_are_read(plain, tmp_path, form, change, message):
    quantised_drafter(plain, tmp_path / "quantised", form)
    damaged(tmp_path / "quantised", change)
    with pytest.raises(CheckpointError, match=message):
        check_draft_model(tmp_path / "quantised")


DAMAGED = {
    "a scale that is no number": ("fp8", replaced("weight_scale_inv", lambda s: s * torch.nan), "is not finite"),
    "a code that is no number": (
        "fp8 by blocks",
        replaced("weight", lambda codes: torch.full(codes.shape, torch.nan).to(codes.dtype)),
        "is not finite when it is dequantised",
    ),
    "no scale of scales": ("nvfp4-pack-quantized", replaced("weight_global_scale", torch.zeros_like), "scale is zero"),
    "scales of zero": ("pack-quantized", replaced("weight_scale", torch.zeros_like), "weight_scale is zero"),
    "codes of another width": ("pack-quantized", replaced("weight_packed", torch.Tensor.long), "cannot be dequantised"),
}


@pytest.mark.parametrize(("form", "change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_values_are_refused_by_name(plain, tmp_path, form, change, message):
    quantised_drafter(plain, tmp_path / "quantised", form)
    damaged(tmp_path / "quantised", change)
    with pytest.raises(CheckpointError, match=rf"{UP}.*{message}.*; download"):
        weights(tmp_path / "quantised", torch.float32)


def test_a_module_that_is_not_quantised_stays_as_it_is(plain, tmp_path):
    """The configuration covers it, but what is stored decides."""
    exact = load_file(plain / "model.safetensors")[f"{UP}.weight"]
    expected = quantised_drafter(plain, tmp_path / "quantised", "pack-quantized")

    def keep(tensors, config):
        for part in ("weight_packed", "weight_scale", "weight_shape"):  # not what rounds inputs
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = exact

    damaged(tmp_path / "quantised", keep)
    assert_loads_to(tmp_path / "quantised", expected | {f"{UP}.weight": exact})


def test_a_quantisation_that_was_copied_from_the_target_says_nothing(plain):
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (plain / "config.json").write_text(json.dumps(config))
    (plain / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    reading = read(plain)
    assert reading.storage is None
    assert [remark.sentence for remark in reading.remarks if "is the target's" in remark.sentence]
    assert_loads_to(plain, load_file(plain / "model.safetensors"))


def test_blocks_are_those_of_transformers():
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes = torch.randn(64, 32).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 2)
    for dtype in DTYPES:
        reference = fp8.Fp8Dequantize(None)._dequantize_one(codes, scales, dtype)
        assert torch.equal(times_scales(codes, scales, (16, 16)).to(dtype), reference)


def test_what_was_done_is_said(plain, tmp_path):
    quantised_drafter(plain, tmp_path / "quantised", "pack-quantized")
    storage = read(tmp_path / "quantised").storage
    said = storage.dequantised(weights(tmp_path / "quantised", torch.bfloat16).values())
    assert said.startswith("15 weights stored as compressed-tensors pack-quantized (int4 by group of 16), dequantised ")
    assert said.endswith("to bfloat16: 0.0 MiB in the files, 0.0 MiB loaded")
    assert storage.methods == {"compressed-tensors"}
    assert read(plain).storage is None
