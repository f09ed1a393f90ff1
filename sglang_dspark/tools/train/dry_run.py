"""What a run would take, from configurations alone: no weights are loaded, and no file is written."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of
from sglang_dspark.tools.train.config import TextPlan, TrainConfig
from sglang_dspark.tools.train.conversations import read_conversations
from sglang_dspark.tools.train.memory import TrainingBytes, trained_parameters, training_bytes

# Of the rate of large matrix products, what a step reaches beside norms, softmaxes and launches. A guess: it stands in
# what is printed.
SHARE_OF_RATE = 0.4
_RATE_SECONDS = 0.3
# Side of the square matrices that tell the rate.
_RATE_SIZE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True)
class Forecast:
    """Counts, bytes and operations; of tokens, as if all prompts and answers were the longest."""

    target_parameters: int
    target_bytes: int  # per process
    trained_parameters: int
    training: TrainingBytes  # per process
    texts: int  # to train on
    text_tokens: int  # of all texts to train on, prompts included
    written_tokens: int  # that the target writes, held-out texts included
    states_bytes: int  # of all texts to train on, where they are kept
    draft_bytes: int  # of the checkpoint
    steps: int | None  # None where the time ends the run
    blocks_per_step: int
    rows_per_step: int
    step_operations: float  # floating point, of all processes

    @property
    def epochs(self) -> float | None:
        """Times that each text is read."""
        return None if self.steps is None else self.steps * self.rows_per_step / self.texts


def forecast(plan: TextPlan, corpus: Path, config: TrainConfig, target_config: Any, processes: int) -> Forecast:
    """Count what a run would take.

    Args:
        corpus: folder of the texts, which tells the number of prompts where it has been begun.
        target_config: the target's transformers text configuration.

    Raises:
        ConfigError: the prompts cannot be read, or all would be held out.
    """
    draft = config.draft_config(target_config)
    parameters = _target_parameters(target_config)
    stored = plan.stored_taps is not None
    num_bytes = config.compute_torch_dtype.itemsize
    answers, held_out = _num_answers(plan, corpus)
    longest = plan.max_prompt_tokens + plan.max_tokens
    width = (draft.num_taps + 1) * draft.hidden_size
    trained = trained_parameters(draft)
    copies = 2 * draft.vocab_size * draft.hidden_size if config.own_embeddings else 0
    return Forecast(
        target_parameters=parameters,
        target_bytes=parameters * num_bytes,
        trained_parameters=trained,
        training=training_bytes(config, target_config, longest, processes),
        texts=answers,
        text_tokens=answers * longest,
        written_tokens=(answers + 2 * held_out) * plan.max_tokens,
        states_bytes=answers * longest * width * num_bytes,
        draft_bytes=2 * (trained + copies),
        steps=config.steps if config.max_minutes is None else None,
        blocks_per_step=config.batch_rows * config.anchors_per_row,
        step_operations=_step_operations(config, draft, parameters, trained, longest, stored=stored),
        rows_per_step=config.batch_rows,
    )


def _num_answers(plan: TextPlan, corpus: Path) -> tuple[int, int]:
    """Answers to train on, and held-out ones, if every turn is answered."""
    begun = corpus / "prompts.jsonl"
    if begun.exists():
        rows = [json.loads(line) for line in lines_of(begun.read_text(encoding="utf-8"))]
        turns = [(len(row["turns"]) if "turns" in row else 1, row["held_out"]) for row in rows]
        asked = [number for number, apart in turns if not apart]
        held_out = sum(number for number, apart in turns if apart)
    else:
        found = [len(talk[: plan.answered_turns]) for source in plan.prompts for talk in read_conversations(source)]
        # Which ones are drawn and held out is decided later; the longest are counted.
        drawn = sorted(found, reverse=True)[: plan.max_prompts] + [1] * plan.invent
        asked, held_out = drawn[: max(0, len(drawn) - plan.held_out)], sum(drawn[: plan.held_out])
    if not asked:
        raise ConfigError(
            f"--held-out {plan.held_out} leaves no prompt to train on; give more --prompts, a larger --invent, or a "
            "smaller --held-out"
        )
    repeats, rest = divmod(plan.texts or len(asked), len(asked))
    return repeats * sum(asked) + sum(asked[:rest]), held_out


def _target_parameters(target_config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(target_config).parameters())


def _step_operations(
    config: TrainConfig, draft: DraftConfig, target_parameters: int, trained: int, longest: int, *, stored: bool
) -> float:
    """Two per multiplication and addition of a weight, and twice that again backward; scores of attention are few."""
    tokens = config.batch_rows * longest
    slots = config.batch_rows * config.anchors_per_row * draft.block_size
    d = draft.hidden_size
    context = draft.num_taps * d * d + 2 * draft.num_hidden_layers * d * draft.num_key_value_heads * draft.head_dim
    per_token = 0 if not config.markov_rank else 2 * draft.vocab_size * config.markov_rank
    vocabulary = config.loss_vocab + config.loss_vocab_sampled if config.loss_vocab else draft.vocab_size
    # Both LM heads forward, the drafter's and the Markov biases backward.
    heads = 2 * vocabulary * (3 * d + 3 * config.markov_rank)
    backbone = trained - per_token - draft.num_taps * d * d
    forward_of_target = 0 if stored else 2 * target_parameters * tokens
    return forward_of_target + 6.0 * (context * tokens + backbone * slots) + heads * slots


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Floating point operations per second that products of large matrices reach on this device now."""
    kind = device.partition(":")[0]
    size = _RATE_SIZE[kind]
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    started, done = time.perf_counter(), -1
    while (passed := time.perf_counter() - started) < _RATE_SECONDS:
        a @ b
        if kind == "cuda":
            torch.cuda.synchronize(device)
        if done < 0:
            # The first product chooses a kernel.
            started = time.perf_counter()
        done += 1
    return 2.0 * size**3 * max(done, 1) / max(passed, 1e-9)
