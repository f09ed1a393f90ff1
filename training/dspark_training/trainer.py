"""The training loop, on accelerate: one process or several, gradient accumulation, mixed precision, checkpoints.

A run that was interrupted goes on from its last checkpoint, with the texts shuffled again.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import get_scheduler

from dspark_training.anchors import AnchorBatch, collate, sample_anchors
from dspark_training.initial_drafter import InitialDrafter
from dspark_training.initialise import initialise
from dspark_training.loss import Objective
from dspark_training.loss_vocabulary import LossVocabulary, VocabularySlice
from dspark_training.report import StepReport, Sums
from dspark_training.settings import TrainConfig
from dspark_training.target import Target, TargetStates
from dspark_training.texts import Text, states_of
from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import FILE, save_token_ids
from sglang_dspark.draft.weights import save_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import atomic_write_text

DRAFT_DIR = "draft"
LOG_FILE = "log.jsonl"
SETTINGS_FILE = "training_settings.json"
# Texts whose features set the scale of the context projection at the start.
_INIT_TEXTS = 16
# Steps between two lines of the log.
_LOG_EVERY = 10
# Settings with which a run may go on that was begun with others.
_MAY_CHANGE = ("steps", "checkpoint_every", "patience", "batch_rows", "gradient_accumulation")

OnReport = Callable[[StepReport], None]
OnStep = Callable[[int], None]
# Texts with the anchors that were drawn for them.
_Drawn = tuple[Sequence[Text], Sequence[Tensor]]


@dataclass
class Progress:
    """The progress of a run, and its best checkpoint."""

    step: int = 0
    best_step: int = -1
    best_tau: float = 0.0
    worse: int = 0  # measurements since the best one

    def measured(self, tau: float) -> bool:
        """Note a held-out accept length and return whether it is the longest so far."""
        if self.best_step >= 0 and tau <= self.best_tau:
            self.worse += 1
            return False
        self.best_step, self.best_tau, self.worse = self.step, tau, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the contents of a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        vars(self).update(state)


class Trainer:
    """Trains one drafter for one target, and keeps it in `out_dir`.

    `out_dir` holds ``draft/`` (a checkpoint of the best held-out measurement, bfloat16), ``state-N/`` (what accelerate
    goes on from after N steps), ``training_settings.json`` and ``log.jsonl``. The first process writes them.

    Args:
        texts: to train on.
        held_out: to measure on.
        init: a drafter to start from: tensors that fit in name and shape are taken, others drawn.

    Raises:
        ConfigError: `out_dir` holds a run with other settings, or a drafter without a state to go on from; or no tensor
            of `init` fits.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        texts: Sequence[Text],
        held_out: Sequence[Text],
        out_dir: Path,
        accelerator: Accelerator,
        init: InitialDrafter | None = None,
    ) -> None:
        if target.tap_ids != tuple(config.target_layer_ids):
            raise ConfigError(
                f"target_layer_ids={list(config.target_layer_ids)}, but the target is tapped at {list(target.tap_ids)}"
            )
        self.config, self.out_dir, self.progress = config, out_dir, Progress()
        self._target, self._accelerator = target, accelerator
        counts = answer_counts(texts, target.vocab_size)
        self._vocabulary = LossVocabulary(counts, config.loss_vocab, config.loss_vocab_sampled)
        self._token_ids = _proposed_tokens(config, counts, init)
        state = _state_to_continue(out_dir, config)
        # Each process draws other anchors; all of them draw the same order of the texts and the same first weights.
        self._generator = torch.Generator().manual_seed(config.seed + 1_000_003 * (1 + accelerator.process_index))
        loader: DataLoader[Any] = DataLoader(
            list(texts),  # type: ignore[arg-type]  # a list is a data set
            config.batch_rows,
            shuffle=True,
            collate_fn=self._with_anchors,
            generator=torch.Generator().manual_seed(config.seed if state is None else config.seed + _step_of(state)),
        )
        self._loader = accelerator.prepare_data_loader(loader, device_placement=False)
        drawn = torch.Generator().manual_seed(config.seed)
        anchors = [sample_anchors(text, config.anchors_per_row, drawn) for text in held_out]
        share = slice(accelerator.process_index, None, accelerator.num_processes)
        self._held_out = list(zip(held_out, anchors, strict=True))[share]

        self.model = DraftModel(config.draft_config(target.config), own_embedding=False, own_lm_head=False)
        # Weights are drawn on the CPU, so that a seed means the same drafter on every device.
        self.model.bind_target(target.embed_weight.cpu(), target.lm_head_weight.cpu(), embed_scale=target.embed_scale)
        if state is None:
            initialise(self.model, target, self._some_features(texts), torch.Generator().manual_seed(config.seed))
            if init is not None:
                init.give(self.model)
        self.model.to(accelerator.device)
        on_device = (weight.to(accelerator.device) for weight in (target.embed_weight, target.lm_head_weight))
        self.model.bind_target(*on_device, embed_scale=target.embed_scale)
        lm_head = target.lm_head_weight.to(accelerator.device, config.compute_torch_dtype)
        optimizer = torch.optim.AdamW(_parameter_groups(self.model, config), weight_decay=config.weight_decay)
        warmup = round(config.steps * config.warmup_share)
        # Not prepared: accelerate would let it make a step for each process.
        self._scheduler = get_scheduler(config.schedule, optimizer, warmup, config.steps)
        objective = Objective(self.model, lm_head, config.loss)
        self._objective, self._optimizer = accelerator.prepare(objective, optimizer)
        accelerator.register_for_checkpointing(self._scheduler, self.progress)
        if state is not None:
            accelerator.load_state(str(state))
        elif accelerator.is_main_process:
            atomic_write_text(out_dir / SETTINGS_FILE, json.dumps(config.to_dict(), indent=2) + "\n")
        self._sums = self._new_sums()

    def run(
        self, on_report: OnReport = lambda report: None, on_step: OnStep = lambda step: None, until: int | None = None
    ) -> DraftModel:
        """Train to the end, or to step `until`, and return the model; `on_step` gets the steps done.

        Raises:
            ConfigError: the loss is not a number any more; the last checkpoint before that stays.
        """
        config, progress = self.config, self.progress
        for batch in self._batches():
            if self._is_over() or progress.step == until:
                break
            self._train_on(batch)
            if not self._accelerator.sync_gradients:
                continue
            progress.step += 1
            on_step(progress.step)
            if progress.step % _LOG_EVERY == 0:
                self._report(self._sums, on_report, held_out=False)
                self._sums = self._new_sums()
            if progress.step % config.checkpoint_every == 0 or progress.step == config.steps:
                self._checkpoint(on_report)
        return self.model

    def export(self, directory: Path) -> None:
        """Write the drafter as a bfloat16 checkpoint, with copies of embedding and LM head if the settings say so."""
        with torch.device("meta"):
            exported = DraftModel(self.model.config, own_embedding=False, own_lm_head=False)
        weights = {name: weight.to(torch.bfloat16) for name, weight in self.model.state_dict().items()}
        exported.load_state_dict(weights, assign=True)
        if self.config.own_embeddings:
            own = (self._target.embed_weight, self._target.lm_head_weight)
            exported.bind_target(*(weight.to(torch.bfloat16) for weight in own))
        save_draft_model(exported, directory, include_embeddings=self.config.own_embeddings)
        if self._token_ids is not None:
            save_token_ids(directory / FILE, self._token_ids)

    def _is_over(self) -> bool:
        patience = self.config.patience
        return self.progress.step >= self.config.steps or (patience is not None and self.progress.worse >= patience)

    def _batches(self) -> Iterator[_Drawn]:
        while True:
            yield from self._loader

    def _with_anchors(self, texts: list[Text]) -> _Drawn:
        return texts, [sample_anchors(text, self.config.anchors_per_row, self._generator) for text in texts]

    def _train_on(self, drawn: _Drawn) -> None:
        batch = self._collate(drawn)
        vocabulary = self._vocabulary.draw(self._generator, self._accelerator.device)
        with self._accelerator.accumulate(self._objective):
            output = self._objective(batch, vocabulary)
            self._accelerator.backward(output.loss)
            if self._accelerator.sync_gradients:
                self._accelerator.clip_grad_norm_(self.model.parameters(), self.config.grad_clip)
            self._optimizer.step()
            self._optimizer.zero_grad()
        if self._accelerator.sync_gradients:
            self._scheduler.step()
        self._sums.add(output, batch)

    def _collate(self, drawn: _Drawn) -> AnchorBatch:
        """Put the target's states next to texts and anchors."""
        texts, anchors = drawn
        states = states_of(self._target, texts)
        device, dtype = self._accelerator.device, self.config.compute_torch_dtype
        states = TargetStates(states.features.to(device, dtype), states.last_hidden.to(device, dtype))
        return collate(texts, anchors, states, self.model.config.gamma)

    def _some_features(self, texts: Sequence[Text]) -> Tensor:
        """Return tapped features ``[n, m * d]`` of the first texts, on the CPU."""
        first = texts[:_INIT_TEXTS]
        features = states_of(self._target, first).features
        return torch.cat([f[: len(text.input_ids) - 1] for f, text in zip(features, first, strict=True)]).cpu()

    def _new_sums(self) -> Sums:
        return Sums(self.model.config.gamma, self._accelerator.device)

    @torch.no_grad()
    def _measure(self) -> Sums:
        """Return sums over the held-out texts on the whole vocabulary, with the same anchors every time."""
        sums = self._new_sums()
        for start in range(0, len(self._held_out), self.config.batch_rows):
            texts, anchors = zip(*self._held_out[start : start + self.config.batch_rows], strict=True)
            batch = self._collate((texts, anchors))
            sums.add(self._objective(batch, VocabularySlice(None, None, None)), batch)
        return sums

    def _checkpoint(self, on_report: OnReport) -> None:
        report = self._report(self._measure(), on_report, held_out=True)
        first = self._accelerator.is_main_process
        if self.progress.measured(report.tau) and first:
            self.export(self.out_dir / DRAFT_DIR)
        state = self.out_dir / f"state-{self.progress.step}"
        partial = self.out_dir / "state.partial"
        self._accelerator.save_state(str(partial))
        self._accelerator.wait_for_everyone()
        if first:
            older = _states(self.out_dir)
            partial.replace(state)
            for path in older:
                shutil.rmtree(path)
        self._accelerator.wait_for_everyone()

    def _report(self, sums: Sums, on_report: OnReport, *, held_out: bool) -> StepReport:
        report = sums.report(self.progress.step, self._accelerator, held_out=held_out)
        if not math.isfinite(report.loss):
            raise ConfigError(
                f"--learning-rate {self.config.learning_rate}: training has diverged before step {report.step}; give a "
                "smaller one and another --output"
            )
        if self._accelerator.is_main_process:
            with (self.out_dir / LOG_FILE).open("a", encoding="utf-8") as log:
                log.write(json.dumps(vars(report)) + "\n")
        self._accelerator.log(report.scalars(), step=report.step)
        on_report(report)
        return report


def refuse_finished(out_dir: Path) -> None:
    """Refuse to train a new drafter over one that cannot be continued.

    Raises:
        ConfigError: there is a drafter in `out_dir`, and the state of its training is gone.
    """
    draft = out_dir / DRAFT_DIR
    if (draft / "config.json").exists() and not _states(out_dir):
        raise ConfigError(
            f"{draft} holds a drafter, and the folder state-N next to it is gone, without which training would begin "
            f"anew and write over it; give another --output, or remove {draft}"
        )


def answer_counts(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """Count how often each token occurs in the answers: ``[V]`` int64."""
    answers = torch.cat([text.input_ids[text.prompt_len :] for text in texts])
    return torch.bincount(answers, minlength=vocab_size)


def _states(out_dir: Path) -> list[Path]:
    return sorted(out_dir.glob("state-*"), key=_step_of)


def _step_of(state: Path) -> int:
    return int(state.name.removeprefix("state-"))


def _state_to_continue(out_dir: Path, config: TrainConfig) -> Path | None:
    refuse_finished(out_dir)
    states = _states(out_dir)
    if not states:
        return None
    ours = json.loads(json.dumps(config.to_dict()))
    theirs = json.loads((out_dir / SETTINGS_FILE).read_text(encoding="utf-8"))
    changed = [
        f"{key}={ours[key]!r} (then {theirs.get(key)!r})"
        for key in sorted(ours)
        if key not in _MAY_CHANGE and theirs.get(key) != ours[key]
    ]
    if changed:
        raise ConfigError(
            f"--output {out_dir} is of a run with other settings: {', '.join(changed)}; give the same settings to "
            f"continue it, or another --output, with --init {out_dir / DRAFT_DIR} to begin with this drafter"
        )
    return states[-1]


def _parameter_groups(model: DraftModel, config: TrainConfig) -> list[dict[str, Any]]:
    """Let the Markov embeddings learn at a rate of their own: the row of a token is seldom updated."""
    markov = model.markov_head
    per_token = [] if markov is None else [markov.markov_w1.weight, markov.markov_w2.weight]
    rest = [p for p in model.parameters() if not any(p is q for q in per_token)]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": config.learning_rate}]
    if per_token:
        groups.append({"params": per_token, "lr": config.learning_rate * config.markov_lr_scale})
    return groups


def _proposed_tokens(config: TrainConfig, counts: Tensor, init: InitialDrafter | None) -> list[int] | None:
    """Choose the tokens that the drafter is to propose; None stands for all."""
    if not config.draft_vocabulary:
        return None if init is None else init.token_ids
    if config.draft_vocabulary > len(counts):
        raise ConfigError(
            f"--draft-vocabulary {config.draft_vocabulary} is more than the {len(counts)} tokens of the target; leave "
            "it out to propose all"
        )
    chosen: list[int] = counts.argsort(descending=True, stable=True)[: config.draft_vocabulary].tolist()
    return chosen
