"""What a training run is told, and what follows from it before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.train.config import TextPlan
from sglang_dspark.tools.train.initial_drafter import initial_config
from sglang_dspark.tools.train.run_folder import refuse_finished
from sglang_dspark.tools.train.target import check_tap_ids
from sglang_dspark.tools.train.target_defaults import default_taps
from sglang_dspark.tools.train.text_folder import TextFolder


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Everything that the command can be told."""

    target: str  # checkpoint folder or name on the Hugging Face hub
    output: Path
    corpus: Path
    plan: TextPlan
    plan_options: frozenset[str]  # fields of the plan that the user set
    store_states: bool = False
    server: str | None = None
    api_key: str | None = None
    concurrency: int
    taps: tuple[int, ...] | None = None
    layers: int | None = None
    mask_token_id: int | None = None
    init: str | None = None  # drafter to start from, a folder or a name on the hub
    settings: dict[str, Any]  # further fields of `TrainConfig`
    given: frozenset[str] = frozenset()  # options that the user set: of the others, `init` decides about the shape
    device: str
    compute_dtype: Literal["float32", "bfloat16"]

    @property
    def writes_in_process(self) -> bool:
        """Whether the target writes in this process: on a GPU a server is faster, but it does not give states."""
        return self.server is None and (self.store_states or not self.device.startswith("cuda"))

    @property
    def dtype(self) -> torch.dtype:
        """Of target and drafter while they run."""
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return dtype


@dataclass(frozen=True)
class Prepared:
    """What is known of a job before anything is loaded or written."""

    target_config: Any  # transformers text configuration
    like: DraftConfig | None  # of the drafter to start from
    taps: tuple[int, ...]
    folder: TextFolder


def prepare(job: TrainJob) -> Prepared:
    """Read configurations; nothing is loaded or written.

    Raises:
        ConfigError: the output cannot be trained in, target or drafter are not there or do not go together, or the
            texts were begun with other options.
        CheckpointError: there is no such drafter to start from, or it cannot be read.
    """
    refuse_finished(job.output)
    target_config = _read_target_config(job.target)
    like = None if job.init is None else initial_config(job.init, target_config)
    taps = _taps_of(job, target_config, like)
    plan = replace(job.plan, stored_taps=taps if job.store_states else None)
    return Prepared(target_config, like, taps, TextFolder(job.corpus, plan, job.plan_options))


def _read_target_config(path: str) -> Any:
    """The target's transformers text configuration, of a folder or a name on the hub.

    Raises:
        ConfigError: it cannot be had.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    except (OSError, ValueError) as error:
        # What the hub says of a path is that no repository can have such a name.
        is_path = path.startswith(("/", ".", "~"))
        reason = "there is no such folder" if is_path and not Path(path).exists() else str(error).splitlines()[0]
        raise ConfigError(
            f"--target {path}: {reason}; give the folder of a checkpoint, or the name of a model on the Hugging Face "
            "hub"
        ) from error


def _taps_of(job: TrainJob, target_config: Any, like: DraftConfig | None) -> tuple[int, ...]:
    """Layers of the target that the drafter reads.

    Raises:
        ConfigError: the target does not have them.
    """
    layers = target_config.num_hidden_layers
    taps = job.taps or (default_taps(layers) if like is None else like.target_layer_ids)
    check_tap_ids(taps, layers)
    return taps
