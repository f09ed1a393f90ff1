"""The golden drafter in the forms in which trainers publish theirs.

Public command lines, and how many flags of SGLang are served, adjusted and refused.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import format_exports
from faked_gpu import Pairs, Resolved
from golden_server import DRAFT
from safetensors.torch import load_file, save_file
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.server_args import ServerArgs

FORMS: Mapping[str, format_exports.Export] = {
    "speculators": format_exports.speculators,  # without a model_type, and auto_map names only the configuration
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


DATA = Path(__file__).parents[1] / "data" / "command_lines.toml"


@dataclass(frozen=True)
class Line:
    """A command line as in ``data/command_lines.toml``, and flags that DSPARK changes or refuses."""

    source: str
    gpu: str
    target: str
    flags: str
    adjusted: str = ""
    refused: str = ""

    def plain(self, pairs: Pairs) -> Resolved:
        """Resolve it without any speculative algorithm."""
        flags = re.sub(r"--speculative-\S+?(?:=| )\S+", "", self.flags).split()
        with patch.dict(os.environ):
            return pairs.resolve(self.gpu, self.target, *flags, with_dspark=False)

    def with_dspark(self, pairs: Pairs) -> Resolved:
        """Resolve it with DSPARK; a start that is refused raises."""
        with patch.dict(os.environ):
            return pairs.resolve(self.gpu, self.target, *self.flags.split())


LINES = [Line(**line) for line in tomllib.loads(DATA.read_text(encoding="utf-8"))["line"]]


def counted() -> dict[str, int]:
    """Return how many flags SGLang has, and how many have values that are adjusted, refused, or one and the other."""
    from sglang_dspark.engine.flags import all_rules
    from sglang_dspark.engine.start import LENGTHS

    rules = all_rules()
    adjusted = LENGTHS.keys() | {rule.name for rule in rules if rule.adjusts}
    refused = {rule.name for rule in rules if not rule.adjusts}
    names = {field.name for field in record_fields(ServerArgs)}
    return {
        "flags": len(names),
        "served": len(names - adjusted - refused),
        "adjusted": len(adjusted - refused),
        "refused": len(refused - adjusted),
        "either": len(adjusted & refused),
    }
