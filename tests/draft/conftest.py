"""Random tiny checkpoints in the DeepSpec layout, written key by key and tensor by tensor without the package."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from canonical_drafter import config_json, proposed_tokens, random_tensors
from safetensors.torch import save_file

Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    return Path(__file__).parent.parent / "data" / "golden"


@pytest.fixture
def write(tmp_path) -> Checkpoint:
    """``write(config, tensors) -> Path`` of a new checkpoint."""

    def write(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
        folder = tmp_path / f"draft{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def make_checkpoint(write) -> Checkpoint:
    """``make_checkpoint(seed=0, drop=(), add={}, **config overrides) -> Path`` of a fresh checkpoint directory."""

    def make(
        *, seed: int = 0, drop: tuple[str, ...] = (), add: dict[str, torch.Tensor] | None = None, **overrides
    ) -> Path:
        config = config_json(**overrides)
        tensors = {name: t for name, t in random_tensors(config, seed).items() if name not in drop}
        path = write(config, tensors | (add or {}))
        if proposed := config.get("draft_vocab_size"):
            content = {"version": 1, "token_ids": proposed_tokens(proposed)}
            (path / "draft_vocabulary.json").write_text(json.dumps(content))
        return path

    return make


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    """``make_config(**overrides) -> dict``: a decoded config.json; Ellipsis removes a key."""
    return config_json
