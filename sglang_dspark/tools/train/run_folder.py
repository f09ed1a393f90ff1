"""What a training run leaves in its folder, and when another run may go on in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import write_text_whole
from sglang_dspark.tools.train.rows import CorpusRow

STATE_FILE = "training_state.pt"
DRAFT_DIR = "draft"
LOG_FILE = "log.jsonl"


def refuse_finished(out_dir: Path) -> None:
    """Refuse to train a new drafter over one that cannot be continued.

    Raises:
        ConfigError: there is a drafter in `out_dir`, and the state of its training is gone.
    """
    draft = out_dir / DRAFT_DIR
    if (draft / "config.json").exists() and not (out_dir / STATE_FILE).exists():
        raise ConfigError(
            f"{draft} holds a drafter, and {STATE_FILE} is gone, without which training would begin anew and write "
            f"over it; give another output directory, or remove {draft}"
        )


def digest(rows: Sequence[CorpusRow]) -> str:
    """What tells texts from others, in their order."""
    hashed = hashlib.sha256()
    for row in rows:
        hashed.update(torch.tensor([row.prompt_len, *row.input_ids.shape]).numpy().tobytes())
        hashed.update(row.input_ids.long().cpu().numpy().tobytes())
    return hashed.hexdigest()


def forget_later_steps(log: Path, step: int) -> None:
    """Take out of a log what comes after `step`: a run that goes on from there will write it again.

    A last line that was being written when the run was killed goes as well.
    """
    if not log.exists():
        return
    lines = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    write_text_whole(log, "".join(line for line in lines if json.loads(line)["step"] <= step))
