"""Reads a checkpoint of any format: what config.json says of the network, and tensors under their ordinary names."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.formats import readers
from sglang_dspark.draft.formats.content import DRAFT_TO_TARGET, IS_DRAFTED, Content, Shapes, recognise_format
from sglang_dspark.draft.formats.readers import Reading
from sglang_dspark.draft.gguf import GgufFile, open_gguf
from sglang_dspark.draft.quantised import KEYS, DequantisedTensors, Storage, recognise_scheme
from sglang_dspark.draft.stored import FLOATS, StoredTensors, has_tensors
from sglang_dspark.errors import CheckpointError

CONFIG_FILE = "config.json"
Tensors = StoredTensors | DequantisedTensors | GgufFile
_MASK_FILE = "mask_embedding.pt"
_QUANTISATION_FILE = "hf_quant_config.json"
_PLAIN_TENSORS = (".weight", ".bias", ".attention_sink_bias", ".layer_scalar", DRAFT_TO_TARGET, IS_DRAFTED)


@dataclass(frozen=True)
class Files:
    """An open checkpoint.

    Attributes:
        content: decoded config.json, without the keys by which tensors have been dequantised.
        origin: the file that it is from, for messages.
        tensors: None without tensor files.
        storage: how they are quantised; None if they are not.
    """

    content: Mapping[str, Any]
    origin: str
    tensors: Tensors | None
    storage: Storage | None = None


def open_files(path: Path, stack: ExitStack) -> Files:
    """Open a checkpoint until ``stack`` is closed.

    Args:
        path: its folder, or a GGUF file.

    Raises:
        CheckpointError: files are missing or damaged, or quantised in a way that is not read.
    """
    if (file := _gguf_in(path)) is not None:
        gguf = open_gguf(file)
        return Files(gguf.content, str(file), gguf, gguf.storage)
    if (path / _MASK_FILE).is_file():
        words = "an embedding of the mask that is not the target's is not supported; use another drafter of this target"
        raise CheckpointError(f"{path / _MASK_FILE}: {words}")
    content, origin = _decode(path / CONFIG_FILE), str(path / CONFIG_FILE)
    if not has_tensors(path):
        return Files(content, origin, None)
    stored = StoredTensors(path, stack)
    config = next((content[key] for key in KEYS if content.get(key)), None)
    if config is None and (path / _QUANTISATION_FILE).is_file():
        config = _decode(path / _QUANTISATION_FILE)
    if not isinstance(config, Mapping) or _is_plain(stored):
        return Files(content, origin, stored)
    dequantised = DequantisedTensors(stored, recognise_scheme(config, origin), str(path))
    content = {key: value for key, value in content.items() if key not in KEYS}
    return Files(content, origin, dequantised, dequantised.storage)


def _is_plain(stored: StoredTensors) -> bool:
    """Return whether tensors are what their names say: a trainer may have copied the quantisation of its target."""
    return all(
        name.endswith(_PLAIN_TENSORS) and (stored.dtype(name) in FLOATS or name in (DRAFT_TO_TARGET, IS_DRAFTED))
        for name in stored.shapes
    )


def _gguf_in(path: Path) -> Path | None:
    """Return the GGUF file that ``path`` is or holds; None if it has safetensors, or neither."""
    if path.is_file():
        return path
    files = [] if has_tensors(path) else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path}: holds several GGUF files, {names}; give the path of one")
    return files[0] if files else None


def _decode(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); give the directory of a downloaded drafter, or a .gguf file"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not valid JSON ({error}); download the checkpoint again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, not an object; download it again")
    return content


def read_config(path: str | Path) -> DraftConfig:
    """Read the configuration of the checkpoint at ``path``; see :func:`read`."""
    return read(path).config


def read(path: str | Path) -> Reading:
    """Read a checkpoint, of whatever format, except the values of its tensors.

    Args:
        path: its folder, or a GGUF file.

    Raises:
        CheckpointError: files are missing or damaged, or the drafter is one that is not served.
    """
    with ExitStack() as stack:
        files = open_files(Path(path), stack)
        shapes = None if files.tensors is None else files.tensors.shapes
    return replace(read_content(files.content, origin=files.origin, shapes=shapes), storage=files.storage)


def read_content(content: Mapping[str, Any], *, origin: str, shapes: Shapes | None = None) -> Reading:
    """Read a decoded config.json.

    Args:
        content: the config.json.
        origin: its name, for messages.
        shapes: of the tensors in the checkpoint's files; None or empty if there are none.

    Raises:
        CheckpointError: a key is missing, malformed, contradictory or unsupported, or the format is not known.
    """
    keys = Content(content, origin, shapes)
    name = recognise_format(content, keys.shapes.keys(), origin)
    if name == "DeepSpec":
        return readers.read_deepspec(keys)
    if name == "speculators":
        return readers.read_speculators(keys)
    return readers.read_dflash(name, keys)


def switches(config: DraftConfig) -> list[str]:
    """Return the ways in which the network differs from DeepSpec's, in words; none for one of DeepSpec's."""
    found = []
    if config.backbone == "gemma4":
        found.append(f"layers of Gemma 4{', whose values are the keys' if config.attention_k_eq_v else ''}")
    if not config.sample_from_anchor:
        found.append(f"{config.block_size} slots of which the anchor's does not predict")
    seen = list(enumerate(config.visibilities))
    if windowed := [layer for layer, visibility in seen if visibility.window is not None]:
        start = "before the anchor" if config.window_from_anchor else "that slides along with the slots"
        found.append(f"window of {config.sliding_window} rows {start} in {_layers(windowed, config)}")
    if causal := [layer for layer, visibility in seen if visibility.causal]:
        found.append(f"causal block in {_layers(causal, config)}")
    if config.draft_vocab_size is not None:
        found.append(f"heads for {config.draft_vocab_size} of {config.vocab_size} tokens")
    if config.rope_scaling is not None:
        found.append(f"RoPE of type {config.rope_scaling.rope_type}, factor {config.rope_scaling.factor or 1:g}")
    if config.partial_rotary_factor != 1:
        found.append(f"RoPE of {config.partial_rotary_factor:g} of the channel pairs")
    if config.attention_bias:
        found.append("biases in the attention")
    if layers := [layer for layer, has_sinks in enumerate(config.sinks) if has_sinks]:
        found.append(f"attention sinks in {_layers(layers, config)}")
    if config.conv_kernel_size:
        found.append(f"convolutions of {config.conv_kernel_size} taps")
    numbers = {
        "values times": (config.attention_value_scale, 1),
        "logits times": (config.output_multiplier, 1),
        "logits capped at": (config.final_logit_softcapping, None),
    }
    return found + [f"{words} {value:g}" for words, (value, usual) in numbers.items() if value != usual]


def describe(config: DraftConfig) -> str:
    """Return block size, layers, taps, heads and switches in one line."""
    markov, confidence = "no Markov head", "no confidence head"
    if config.markov_rank:
        markov = f"{config.markov_head_type} Markov head of rank {config.markov_rank}"
    if config.selector_top_k is not None:
        markov = f"selector of rank {config.markov_rank} among {config.selector_top_k} tokens"
        confidence = "confidence from the selector"
    if config.enable_confidence_head:
        confidence = f"confidence head {'with' if config.confidence_head_with_markov else 'without'} Markov features"
    depth = "" if config.num_target_layers is None else f" of {config.num_target_layers}"
    parts = [
        f"{config.gamma} drafts per block",
        f"{config.num_hidden_layers} layers",
        f"taps {list(config.target_layer_ids)}{depth}",
        markov,
        confidence,
    ]
    return ", ".join(parts + switches(config))


def _layers(layers: Sequence[int], config: DraftConfig) -> str:
    if len(layers) == config.num_hidden_layers:
        return "all layers"
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
