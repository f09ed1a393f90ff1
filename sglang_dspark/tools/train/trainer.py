"""The training loop: AdamW on float32 parameters, linear warm-up and cosine decay, resumable to the bit.

Everything random in step s depends on (seed, s) alone, so a run that was interrupted continues with exactly the batches
an uninterrupted one would have seen. With a limit on the time the learning rate follows the clock instead of the steps:
such a run always ends in time and with its learning rate at zero, but is not repeatable.

Nothing in a step makes the CPU wait for a GPU; a report does.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.weights import load_draft_model, save_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import written_whole
from sglang_dspark.tools.train.anchors import AnchorBatch, collate, sample_anchors
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.corpus import Corpus
from sglang_dspark.tools.train.initialise import initialise
from sglang_dspark.tools.train.loss import LossOutput, draft_loss
from sglang_dspark.tools.train.loss_vocabulary import LossVocabulary, VocabularySlice
from sglang_dspark.tools.train.rows import ComputedStates, CorpusRow, StateSource
from sglang_dspark.tools.train.run_folder import (
    DRAFT_DIR,
    LOG_FILE,
    STATE_FILE,
    digest,
    forget_later_steps,
    refuse_finished,
)
from sglang_dspark.tools.train.target import Target, TargetStates

# Rows whose features set the scale of the context projection at the start.
_INIT_ROWS = 16
# Settings that a resumed run may change; with another number of steps the learning rate follows the new schedule from
# there, so a run can be cut short with a proper decay, or prolonged.
_MAY_CHANGE = ("steps", "max_minutes", "log_every", "checkpoint_every", "own_embeddings", "device")
# Between checkpoints of a run with a limit on its time.
_CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class StepReport:
    """Means over the slots since the last report, on training batches unless `held_out`."""

    step: int
    loss: float
    ce: float
    l1: float
    confidence: float
    acceptance: tuple[float, ...]  # [gamma] expected acceptance at each slot, given that all before it were accepted
    tau: float  # expected committed tokens per round
    seconds: float  # that the run has trained, earlier parts included
    held_out: bool = False


class Trainer:
    """Trains one drafter for one target on one corpus, and keeps it in `out_dir`.

    `out_dir` holds ``draft/`` (a checkpoint of the latest held-out measurement, bfloat16), ``training_state.pt`` and
    ``log.jsonl``.

    Args:
        states: where the target's states of the rows come from; default: the target itself, batch by batch.
        init: a drafter to start from: tensors that fit in name and shape are taken, others drawn.

    Raises:
        ConfigError: `out_dir` holds the state of a run with other settings or texts, or a drafter without a state; or
            no tensor of `init` fits.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        corpus: Corpus,
        held_out: Corpus,
        out_dir: str | Path,
        states: StateSource | None = None,
        init: str | Path | None = None,
    ) -> None:
        if target.tap_ids != tuple(config.target_layer_ids):
            raise ConfigError(
                f"target_layer_ids={list(config.target_layer_ids)}, but the target is tapped at {list(target.tap_ids)}"
            )
        self.config = config
        self.corpus = corpus
        self.held_out = held_out
        self.out_dir = Path(out_dir)
        self.device = torch.device(config.device)
        self.step = 0
        self._saved_step = -1
        self._seconds_before = 0.0
        self._started = time.perf_counter()
        self._target = target
        self._states_of = states or ComputedStates(target)
        self._texts = digest(corpus.rows), digest(held_out.rows)
        refuse_finished(self.out_dir)
        self._epoch, self._order = -1, torch.empty(0)
        self._target_lm_head = target.lm_head_weight.to(self.device, config.compute_torch_dtype)
        self.vocabulary = LossVocabulary(
            answer_counts(corpus, target.vocab_size), config.loss_vocab, config.loss_vocab_sampled
        )
        # Weights are drawn on the CPU, so that a seed means the same drafter on every device.
        self.model = DraftModel(config.draft_config(target.config), own_embedding=False, own_lm_head=False)
        self.model.bind_target(target.embed_weight.cpu(), target.lm_head_weight.cpu())
        features = self._some_features()
        initialise(self.model, target, features, _generator(config.seed, "initialise", 0))
        if init is not None:
            self._take_weights(Path(init))
        self.model.to(self.device)
        self.model.bind_target(target.embed_weight.to(self.device), target.lm_head_weight.to(self.device))
        self.optimizer = torch.optim.AdamW(
            _parameter_groups(self.model, config), weight_decay=config.weight_decay, fused=True
        )
        self._resume()

    @property
    def progress(self) -> tuple[int, int]:
        """What is done and what there is in total: steps, or seconds where the time ends the run."""
        if self.config.max_minutes is None:
            return self.step, self.config.steps
        total = 60 * self.config.max_minutes
        return int(min(self._position() / self.config.steps, 1.0) * total), int(total)

    def run(
        self,
        on_report: Callable[[StepReport], None] | None = None,
        until: int | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> DraftModel:
        """Train to the end (or stop after step `until`) and return the model; `on_step` gets steps done.

        Raises:
            ConfigError: the loss is not a number any more; the last checkpoint before that stays.
        """
        self._started = saved = time.perf_counter()
        pending: list[LossOutput] = []
        batches: list[Tensor] = []
        while not (over := self._position() >= self.config.steps) and (until is None or self.step < until):
            batch = self._batch(self.step)
            pending.append(self._train_step(batch))
            batches.append(batch.supervised)
            self.step += 1
            if on_step is not None:
                on_step(self.step)
            if self.step % self.config.log_every == 0:
                self._report(pending, batches, False, on_report)
                pending, batches = [], []
            if self._checkpoint_is_due(saved):
                self._checkpoint(on_report)
                saved = time.perf_counter()
        if over and self._saved_step != self.step:
            self._checkpoint(on_report)
        return self.model

    def export(self, directory: str | Path) -> None:
        """Write the drafter as a bfloat16 checkpoint, with copies of embedding and LM head if the settings say so."""
        exported = DraftModel(self.model.config, own_embedding=False, own_lm_head=False)
        exported.load_state_dict(self.model.state_dict())
        exported.to(torch.bfloat16)
        if self.config.own_embeddings:
            exported.bind_target(*(w.to(torch.bfloat16) for w in (self._target.embed_weight, self._target_lm_head)))
        save_draft_model(exported, directory, include_embeddings=self.config.own_embeddings)

    def _train_step(self, batch: AnchorBatch) -> LossOutput:
        factor = _schedule(self._position(), self.config.steps, self.config.warmup_share)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        generator = _generator(self.config.seed, "vocabulary", self.step)
        with self._autocast():
            output = draft_loss(
                self.model,
                batch,
                self.vocabulary.draw(generator, self.device),
                self._target_lm_head,
                self.config.loss,
            )
        self.optimizer.zero_grad(set_to_none=True)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
        self.optimizer.step()
        return replace(output, loss=output.loss.detach())

    def _seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._started

    def _position(self) -> float:
        """Where the run is, in steps of its schedule."""
        if self.config.max_minutes is None:
            return self.step
        return max(self.step, self.config.steps * self._seconds() / (60 * self.config.max_minutes))

    def _checkpoint_is_due(self, saved: float) -> bool:
        if self.config.max_minutes is None:
            return self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps
        return time.perf_counter() - saved >= _CHECKPOINT_SECONDS

    def _batch(self, step: int) -> AnchorBatch:
        """Batch `step`: rows in an order that is shuffled anew each epoch, fresh anchors each time."""
        size, num_rows = self.config.batch_rows, len(self.corpus)
        rows = []
        for position in range(step * size, (step + 1) * size):
            epoch, offset = divmod(position, num_rows)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = torch.randperm(num_rows, generator=_generator(self.config.seed, "epoch", epoch))
            rows.append(self.corpus.rows[self._order[offset]])
        return self._collate(rows, _generator(self.config.seed, "anchors", step))

    def _collate(self, rows: Sequence[CorpusRow], generator: torch.Generator) -> AnchorBatch:
        """`rows` with anchors drawn by `generator`, ready for the loss."""
        anchors = [sample_anchors(row, self.config.anchors_per_row, generator) for row in rows]
        states = self._states_of(rows)
        dtype = self.config.compute_torch_dtype
        states = TargetStates(states.features.to(self.device, dtype), states.last_hidden.to(self.device, dtype))
        return collate(rows, anchors, states, self.config.block_size)

    def _some_features(self) -> Tensor:
        """Tapped features ``[n, m * d]`` of the first rows, on the CPU."""
        rows = self.corpus.rows[:_INIT_ROWS]
        features = self._states_of(rows).features
        return torch.cat([f[: len(row.input_ids) - 1] for f, row in zip(features, rows, strict=True)]).cpu()

    @torch.no_grad()
    def _evaluate(self) -> tuple[list[LossOutput], list[Tensor]]:
        """Losses over the held-out rows on the whole vocabulary, the same anchors every time."""
        outputs, supervised = [], []
        for start in range(0, len(self.held_out), self.config.batch_rows):
            rows = self.held_out.rows[start : start + self.config.batch_rows]
            batch = self._collate(rows, _generator(self.config.seed, "held-out", start))
            with self._autocast():
                whole = VocabularySlice(None, None, None)
                outputs.append(draft_loss(self.model, batch, whole, self._target_lm_head, self.config.loss))
            supervised.append(batch.supervised)
        return outputs, supervised

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        dtype = self.config.compute_torch_dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)

    def _checkpoint(self, on_report: Callable[[StepReport], None] | None) -> None:
        held_out = self._report(*self._evaluate(), True, on_report)
        if not math.isfinite(held_out.loss):
            raise ConfigError(
                f"learning_rate={self.config.learning_rate}: training has diverged before step {self.step}; continue "
                f"from the checkpoint in {self.out_dir} with a smaller one, in another output directory"
            )
        self._save()

    def _report(
        self,
        outputs: list[LossOutput],
        supervised: list[Tensor],
        held_out: bool,
        on_report: Callable[[StepReport], None] | None,
    ) -> StepReport:
        # A last batch of few texts has few slots, and counts for as much as they are.
        slots = torch.stack([mask.sum() for mask in supervised]).float()
        accepted = torch.stack([output.acceptance.sum(dim=(0, 1)) for output in outputs]).sum(0)
        acceptance = accepted / torch.stack([mask.sum(dim=(0, 1)) for mask in supervised]).sum(0)
        report = StepReport(
            step=self.step,
            **{
                name: float(torch.stack([getattr(output, name).detach() for output in outputs]) @ (slots / slots.sum()))
                for name in ("loss", "ce", "l1", "confidence")
            },
            acceptance=tuple(acceptance.tolist()),
            tau=1 + float(acceptance.cumprod(0).sum()),
            seconds=self._seconds(),
            held_out=held_out,
        )
        self.out_dir.mkdir(parents=True, exist_ok=True)
        with (self.out_dir / LOG_FILE).open("a", encoding="utf-8") as log:
            log.write(json.dumps(vars(report)) + "\n")
        if on_report is not None:
            on_report(report)
        return report

    def _save(self) -> None:
        self.out_dir.mkdir(parents=True, exist_ok=True)
        state = {
            "config": self.config.to_dict(),
            "texts": list(self._texts),
            "step": self.step,
            "seconds": self._seconds(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        with written_whole(self.out_dir / STATE_FILE) as partial:
            torch.save(state, partial)
            # Between a drafter and its state nothing may happen: one without the other is no run to go on with.
            self.export(self.out_dir / DRAFT_DIR)
        self._saved_step = self.step

    def _take_weights(self, folder: Path) -> None:
        theirs = load_draft_model(folder, dtype=torch.float32, device="cpu").state_dict()
        ours = self.model.state_dict()
        fitting = {name: w for name, w in theirs.items() if name in ours and w.shape == ours[name].shape}
        if not fitting:
            raise ConfigError(f"--init {folder}: no tensor has a shape of the drafter to be trained; leave it out")
        self.model.load_state_dict(fitting, strict=False)

    def _resume(self) -> None:
        path = self.out_dir / STATE_FILE
        if not path.exists():
            return
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"{path} is damaged ({reason}); remove it to start afresh") from error
        ours = self.config.to_dict()
        theirs = state["config"]
        changed = [
            f"{key}={ours[key]!r} (then {theirs.get(key)!r})"
            for key in sorted(ours)
            if key not in _MAY_CHANGE and theirs.get(key) != ours[key]
        ]
        if changed:
            raise ConfigError(
                f"{path} is of a run with other settings: {', '.join(changed)}; give the same settings to continue "
                "it, or another output directory to start afresh"
            )
        # The state of an earlier release does not know its texts.
        if tuple(state.get("texts", self._texts)) != self._texts:
            raise ConfigError(
                f"{path} is of a run on other texts; give the same --corpus to continue it, or another output "
                "directory to start afresh"
            )
        self.step = self._saved_step = state["step"]
        forget_later_steps(self.out_dir / LOG_FILE, self.step)
        self._seconds_before = state.get("seconds", 0.0)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _parameter_groups(model: DraftModel, config: TrainConfig) -> list[dict[str, Any]]:
    per_token = (
        [] if model.markov_head is None else [model.markov_head.markov_w1.weight, model.markov_head.markov_w2.weight]
    )
    others = [p for p in model.parameters() if not any(p is q for q in per_token)]
    groups: list[dict[str, Any]] = [{"params": others, "peak_lr": config.learning_rate}]
    if per_token:
        groups.append({"params": per_token, "peak_lr": config.learning_rate * config.markov_lr_scale})
    return groups


def _schedule(step: float, steps: int, warmup_share: float) -> float:
    """Factor on the learning rate: linear from 0 over the warm-up, then a cosine to 0 at the end."""
    warmup = max(1, round(steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def _generator(seed: int, purpose: str, index: int) -> torch.Generator:
    """An independent stream for each (seed, purpose, index)."""
    key = int.from_bytes(f"{purpose}/{index}".encode(), "big") % (2**61 - 1)
    return torch.Generator().manual_seed((seed * 1_000_003 + key) % 2**63)


def answer_counts(corpus: Corpus, vocab_size: int) -> Tensor:
    """How often each token occurs in the answers: ``[V]`` int64."""
    answers = torch.cat([row.input_ids[row.prompt_len :] for row in corpus.rows])
    return torch.bincount(answers, minlength=vocab_size)
