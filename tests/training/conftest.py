"""A tiny random target, the texts it writes, and a drafter for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from dspark_training.settings import TrainConfig
from dspark_training.target import Target
from dspark_training.texts import StoredText, keep_states
from dspark_training.trainer import Trainer
from dspark_training.writers import InProcessWriter
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_dspark.draft.model import DraftModel

TAP_IDS = (0, 2)
STOP_ID = 1


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> None:
    """Forget the precision of the last run: accelerate keeps one per process."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def target() -> Target:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=STOP_ID,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    )
    return Target(Qwen3ForCausalLM(config), TAP_IDS)


@pytest.fixture(scope="session")
def rows(target: Target) -> list[StoredText]:
    """Six greedy texts of different prompt lengths."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (length,), generator=generator).tolist() for length in (3, 5, 6, 6, 8, 4)]
    texts = InProcessWriter(target).write(prompts, [0.0] * len(prompts), 20, 1)
    return keep_states(target, texts, batch_tokens=1000)


@pytest.fixture(scope="session")
def config() -> TrainConfig:
    return TrainConfig(
        target_layer_ids=TAP_IDS,
        mask_token_id=2,
        block_size=4,
        num_layers=2,
        markov_rank=8,
        batch_rows=6,
        anchors_per_row=16,
        steps=6,
        learning_rate=5e-3,
        checkpoint_every=3,
    )


@pytest.fixture
def make_drafter(target: Target) -> Callable[[TrainConfig], DraftModel]:
    """Makes a drafter of a configuration with random weights, norms included; the same ones every time."""

    def make(config: TrainConfig) -> DraftModel:
        torch.manual_seed(2)
        model = DraftModel(config.draft_config(target.model.config), own_embedding=False, own_lm_head=False)
        model.bind_target(target.embed_weight, target.lm_head_weight)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0)
        return model

    return make


@pytest.fixture(scope="session")
def trainer_in(target: Target, rows: list[StoredText], config: TrainConfig) -> Callable[..., Trainer]:
    """Makes a trainer of the six texts, which are also held out, in a folder."""

    def make(
        folder: Path, config: TrainConfig = config, *, texts=rows, held_out=rows, target=target, **options
    ) -> Trainer:
        precision = "bf16" if config.compute_dtype == "bfloat16" else "no"
        accelerator = Accelerator(
            cpu=True, mixed_precision=precision, gradient_accumulation_steps=config.gradient_accumulation
        )
        return Trainer(config, target, texts, held_out, folder, accelerator, **options)

    return make


@pytest.fixture
def make_trainer(trainer_in: Callable[..., Trainer], tmp_path: Path) -> Callable[..., Trainer]:
    """Makes one in ``tmp_path`` or a folder in it."""
    return lambda *config, folder=".", **options: trainer_in(tmp_path / folder, *config, **options)
