"""GGUF files of drafters as llama.cpp's converter writes them: architecture ``dflash``, of DFlash 1 and 2 and DSpark.

The gguf package reads them and computes the weights. The metadata say what a config.json says otherwise.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.draft.quantised import Storage
from sglang_dspark.errors import CheckpointError

ARCHITECTURE = "dflash"
_PLAIN = ("F64", "F32", "F16", "BF16", "I64")
"""Types that are no quantisation; safetensors has the same names."""


def _table(pairs: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in pairs.split())


_MODULES = _table(
    "fc=fc enc.output_norm=hidden_norm output_norm=norm output=lm_head token_embd=embed_tokens "
    "markov_w1=markov_head.markov_w1 markov_w2=markov_head.markov_w2 conf_proj=confidence_head.proj "
    "selector_predecessor=markov_head.markov_w1 selector_successor=markov_head.markov_w2 "
    "selector_hidden=markov_head.hidden_projection"
)
_OF_LAYERS = _table(
    "attn_norm=input_layernorm attn_q=self_attn.q_proj attn_k=self_attn.k_proj attn_v=self_attn.v_proj "
    "attn_output=self_attn.o_proj attn_q_norm=self_attn.q_norm attn_k_norm=self_attn.k_norm "
    "ffn_norm=post_attention_layernorm ffn_gate=mlp.gate_proj ffn_up=mlp.up_proj ffn_down=mlp.down_proj "
    "attn_conv_proj=attention_conv.kernel_projection ffn_conv_proj=mlp_conv.kernel_projection"
)
_PARAMETERS = _table(
    "attn_sinks=self_attn.attention_sink_bias attn_conv_base=attention_conv.base_kernel "
    "ffn_conv_base=mlp_conv.base_kernel"
)
"""Of layers, which are no weights of a module."""
_KEYS = _table(
    "embedding_length=hidden_size feed_forward_length=intermediate_size block_count=num_hidden_layers "
    "attention.head_count=num_attention_heads attention.head_count_kv=num_key_value_heads "
    "attention.key_length=head_dim attention.layer_norm_rms_epsilon=rms_norm_eps "
    "attention.sliding_window=sliding_window attention.causal=is_causal context_length=max_position_embeddings "
    "rope.freq_base=rope_theta vocab_size=vocab_size block_size=block_size sample_from_anchor=sample_from_anchor "
    "final_logit_softcapping=final_logit_softcapping logit_scale=output_multiplier "
    "embedding_scale=input_embedding_scale conv_kernel_size=conv_kernel_size conv_group_size=conv_group_size "
    "selector_rank=selector_rank selector_top_k=selector_top_k"
)
_ROPE = _table(
    "rope.scaling.type=rope_type rope.scaling.factor=factor rope.dimension_count=rope_dim "
    "rope.scaling.original_context_length=original_max_position_embeddings"
)
"""Metadata below the architecture's name, and keys of config.json; the last table's are in ``rope_parameters``."""
_READ = {*_KEYS, *_ROPE, "target_layers", "attention.sliding_window_pattern"}
_SAID_BY_TENSORS = {"attention.value_length", "rope.dimension_sections", "has_confidence_head"}


class GgufFile:
    """An open file.

    Attributes:
        content: config.json of the drafter, in the terms of the other formats.
        shapes: of the tensors by their ordinary names.
        storage: what is said of them.
    """

    def __init__(self, path: Path) -> None:
        """Read the metadata, which takes seconds: a vocabulary is among them.

        Raises:
            CheckpointError: the file is damaged or incomplete, or holds another network.
        """
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
            fields = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
            tokens, mask = (reader.fields.get(f"tokenizer.ggml.{key}") for key in ("tokens", "mask_token_id"))
            fields |= {"tokens": len(tokens.data) if tokens else None, "mask": mask.contents() if mask else None}
            self._tensors = {_name(tensor.name): tensor for tensor in reader.tensors}
            self.shapes = {name: self._shape(name) for name in self._tensors}
            self.content = self._read(fields)
        except CheckpointError:
            raise
        except Exception as error:  # of whatever class: bytes that are no lengths, values of other types
            raise CheckpointError(f"{path}: cannot be read as GGUF ({error!r}); download it again") from error
        types = [tensor.tensor_type.name for tensor in reader.tensors if tensor.tensor_type.name not in _PLAIN]
        words = f"GGUF {', '.join(sorted(set(types))) or 'without codes'}"
        size = sum(int(tensor.n_bytes) for tensor in reader.tensors)
        self.storage = Storage(words, frozenset({"gguf"}), len(types), size)

    def dtype(self, name: str) -> str:
        """Return the dtype in the terms of safetensors; codes stand for floating-point numbers."""
        kind = self._tensors[name].tensor_type.name
        return kind if kind in _PLAIN else "F32"

    def read(self, name: str) -> Tensor:
        """Compute the tensor on the CPU; token ids as differences from the drafter's, as other formats have them."""
        from gguf import dequantize

        tensor = self._tensors[name]
        if name == "d2t":
            return torch.from_numpy(tensor.data - np.arange(len(tensor.data)))
        try:
            computed = np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W")
        except Exception as error:  # of whatever class: a type that the package does not compute
            raise CheckpointError(
                f"{self.path}: {tensor.name} of type {tensor.tensor_type.name} cannot be dequantised ({error}); take "
                "another quantisation of the drafter"
            ) from error
        if not np.isfinite(computed).all():
            raise CheckpointError(f"{self.path}: {tensor.name} is not finite; download the file again")
        return torch.from_numpy(computed).reshape(self.shapes[name])

    def _shape(self, name: str) -> list[int]:
        """Return the shape in torch's order. Quantising drops the length 1 of the confidence head's only row."""
        shape = [int(size) for size in reversed(self._tensors[name].shape)]
        return [1, *shape] if name == "confidence_head.proj.weight" and len(shape) == 1 else shape

    def _read(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        found, prefix = fields.get("general.architecture"), f"{ARCHITECTURE}."
        own = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
        if found != ARCHITECTURE:
            raise CheckpointError(
                f"{self.path}: architecture {found!r}; GGUF files that load are those of llama.cpp's "
                f"convert_hf_to_gguf.py for DFlash and DSpark drafters, architecture {ARCHITECTURE!r}: convert the "
                "original drafter with it"
            )
        content = {key: own[name] for name, key in _KEYS.items() if name in own}
        if "head_dim" not in content and content.get("num_attention_heads"):
            content["head_dim"] = content.get("hidden_size", 0) // content["num_attention_heads"]
        if windows := own.get("attention.sliding_window_pattern"):
            content["layer_types"] = [f"{'sliding' if slides else 'full'}_attention" for slides in windows]
        rope = {key: own[name] for name, key in _ROPE.items() if own.get(name, "none") != "none"}
        return {
            "format": "llama.cpp",
            "architectures": ["DFlashDraftModel"],
            "vocab_size": fields["tokens"],
            "mask_token_id": fields["mask"],
            # The output of layer k is the input of k + 1, which is what the file names.
            "target_layer_ids": [layer - 1 for layer in own.get("target_layers", ())],
            "sample_from_anchor": "markov_head.markov_w1.weight" in self.shapes and "selector_rank" not in own,
            "rope_parameters": {"rope_type": "default"} | rope,
            **content,
            **{prefix + name: own[name] for name in own.keys() - _READ - _SAID_BY_TENSORS},
        }


def open_gguf(path: Path) -> GgufFile:
    """Return the file, which is read once for as long as it stays as it is."""
    stat = path.stat()
    return _opened(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1)
def _opened(path: Path, changed_ns: int, size: int) -> GgufFile:
    return GgufFile(path)


def _name(name: str) -> str:
    """Return the ordinary name of a tensor; one that is not known keeps its own."""
    module, _, part = name.rpartition(".")
    if module in _MODULES:
        return f"{_MODULES[module]}.{part}"
    block, _, rest = name.partition(".")
    layer, _, rest = rest.partition(".")
    inner, _, part = rest.partition(".")
    if block != "blk":
        return name
    if inner in _PARAMETERS:
        return f"layers.{layer}.{_PARAMETERS[inner]}"
    return f"layers.{layer}.{_OF_LAYERS.get(inner, inner)}.{part}"
