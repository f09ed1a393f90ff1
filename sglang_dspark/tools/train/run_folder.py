"""What a training run leaves in its folder, and when another run may go on in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import write_text_whole
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.rows import CorpusRow

STATE_FILE = "training_state.pt"
DRAFT_DIR = "draft"
LOG_FILE = "log.jsonl"
# Settings that a resumed run may change; with another number of steps the learning rate follows the new schedule from
# there, so a run can be cut short with a proper decay, or prolonged. What the checkpoint holds is none of them: it is
# only written again when a later drafter is better.
_MAY_CHANGE = ("steps", "max_minutes", "log_every", "checkpoint_every", "device", "micro_batch_rows", "patience")


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


def read_state(out_dir: Path, config: TrainConfig, texts: tuple[str, str]) -> dict[str, Any] | None:
    """The state of the run in `out_dir` that is to be continued, on the CPU; None where there is none.

    Args:
        texts: digests of the texts to train on and of those held out.

    Raises:
        ConfigError: it is damaged, or of a run with other settings or texts.
    """
    path = out_dir / STATE_FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path} is damaged ({reason}); remove it to start afresh") from error
    ours = config.to_dict()
    # A setting that an earlier release did not know had its default.
    theirs = TrainConfig(target_layer_ids=config.target_layer_ids, mask_token_id=config.mask_token_id).to_dict()
    theirs |= state["config"] | {"loss": theirs["loss"] | state["config"]["loss"]}
    changed = [
        f"{key}={ours[key]!r} (then {theirs[key]!r})"
        for key in sorted(ours)
        if key not in _MAY_CHANGE and theirs[key] != ours[key]
    ]
    if changed:
        raise ConfigError(
            f"{path} is of a run with other settings: {', '.join(changed)}; give the same settings to continue it, or "
            f"another --output, with --init {out_dir / DRAFT_DIR} to begin with this drafter"
        )
    # The state of an earlier release does not know its texts.
    if tuple(state.get("texts", texts)) != texts:
        raise ConfigError(
            f"{path} is of a run on other texts; give the same --corpus to continue it, or another output "
            "directory to start afresh"
        )
    return state


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
