"""Reads from the files of a target which layers a drafter may read, before anything is loaded."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from sglang_dspark.draft.stored import FLOATS, StoredTensors, has_tensors

_PREFIXES = {
    "embed_tokens": ("model.embed_tokens.", "model.language_model.embed_tokens.", "language_model.model.embed_tokens."),
    "lm_head": ("lm_head.", "language_model.lm_head."),
}
"""What the names of a layer's tensors begin with: in text models, then in models that read images, whichever release of
transformers wrote them."""


def quantised_layers(folder: Path, *, tied: bool) -> Sequence[str]:
    """Return which of ``embed_tokens`` and ``lm_head`` a target holds in another form than floating-point weights.

    A layer without tensors of these names is not listed, and a target that is no folder of safetensors has none:
    then only the loaded layer tells.

    Args:
        tied: the LM head is the embedding.

    Raises:
        CheckpointError: the tensor files are damaged or incomplete.
    """
    if not has_tensors(folder):
        return ()
    with ExitStack() as stack:
        stored = StoredTensors(folder, stack)
        layers = {"embed_tokens": "embed_tokens", "lm_head": "embed_tokens" if tied else "lm_head"}
        return [
            layer
            for layer, source in layers.items()
            if any(_is_quantised(stored, prefix) for prefix in _PREFIXES[source])
        ]


def _is_quantised(stored: StoredTensors, prefix: str) -> bool:
    if not any(name.startswith(prefix) for name in stored.shapes):
        return False
    weight = f"{prefix}weight"
    return weight not in stored.shapes or stored.dtype(weight) not in FLOATS
