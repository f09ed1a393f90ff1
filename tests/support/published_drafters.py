"""The golden drafter in the forms in which trainers publish theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import format_exports
from golden_server import DRAFT
from safetensors.torch import load_file, save_file

# What each trainer writes beside what describes the network.
_SPECULATORS = {
    "architectures": ["DSparkSpeculator"],
    "speculators_version": "0.8.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
FORMS: Mapping[str, tuple[format_exports.Export, Mapping[str, Any]]] = {
    # Its model_type is no type of transformers, and auto_map names the configuration alone.
    "speculators": (
        format_exports.speculators,
        _SPECULATORS
        | {"model_type": "speculator_model", "auto_map": {"": "dspark.DSparkSpeculatorConfig"}}
        | {"has_no_defaults_at_init": False},
    ),
    "ModelOpt": (format_exports.modelopt, {"torch_dtype": "bfloat16", "is_causal": False}),
}
"""Name -> what writes the network, and the other keys of config.json. DeepSpec's form is the golden drafter's own, and
``random_drafter`` has DFlash's."""


def published_drafter(folder: Path, form: str) -> Path:
    """Write the golden drafter in one of :data:`FORMS`; returns ``folder``."""
    export, added = FORMS[form]
    content, tensors = export(json.loads((DRAFT / "config.json").read_text()), load_file(DRAFT / "model.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content | added))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
