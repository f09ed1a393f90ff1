"""The golden drafter in the forms in which trainers publish theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import format_exports
from golden_server import DRAFT
from safetensors.torch import load_file, save_file

FORMS: Mapping[str, format_exports.Export] = {
    "speculators": format_exports.speculators,  # without a model_type, and auto_map names the configuration alone
    "ModelOpt": format_exports.modelopt,
}
"""DeepSpec's form is the golden drafter's own, and ``random_drafter`` has DFlash's and DFlash 2's."""


def published_drafter(folder: Path, form: str) -> Path:
    """Write the golden drafter in one of :data:`FORMS`; returns ``folder``."""
    given = json.loads((DRAFT / "config.json").read_text()), load_file(DRAFT / "model.safetensors")
    content, tensors = FORMS[form](*given)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
