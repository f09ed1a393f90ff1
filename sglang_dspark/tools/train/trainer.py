"""The training loop: an optimizer on float32 parameters, warm-up and decay, resumable to the bit.

Everything random in step s depends on (seed, s) alone, so a run that was interrupted continues with exactly the batches
an uninterrupted one would have seen. With a limit on the time the learning rate follows the clock instead of the steps:
such a run ends in time, with its learning rate near zero unless its last measurement is long. It is not repeatable.

Several processes divide the texts of each step among themselves and add up their gradients, so that all take the same
step, and the same one as a single process would. Nothing in a step makes the CPU wait for a GPU; a report does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.draft.model import DraftModel
from sglang_dspark.draft.reduced_vocabulary import save_token_ids
from sglang_dspark.draft.weights import save_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import written_whole
from sglang_dspark.tools.train.anchors import AnchorBatch, collate
from sglang_dspark.tools.train.batches import Batches, Piece, pieces_of, seeded, supervised_slots
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.corpus import Corpus
from sglang_dspark.tools.train.initial_drafter import InitialDrafter
from sglang_dspark.tools.train.initialise import initialise
from sglang_dspark.tools.train.loss import LossOutput, draft_loss
from sglang_dspark.tools.train.loss_vocabulary import LossVocabulary, VocabularySlice
from sglang_dspark.tools.train.optimizer import Optimizer, learning_rate_factor
from sglang_dspark.tools.train.parallel import Processes
from sglang_dspark.tools.train.progress import Progress
from sglang_dspark.tools.train.reports import Log, StepReport, Sums
from sglang_dspark.tools.train.rows import ComputedStates, StateSource
from sglang_dspark.tools.train.run_folder import (
    DRAFT_DIR,
    LOG_FILE,
    STATE_FILE,
    digest,
    forget_later_steps,
    read_state,
    refuse_finished,
)
from sglang_dspark.tools.train.slot_weights import weight_of_slots
from sglang_dspark.tools.train.target import Target, TargetStates

# Rows whose features set the scale of the context projection at the start.
_INIT_ROWS = 16
# Between checkpoints of a run with a limit on its time, of which they take a tenth at most.
_CHECKPOINT_SECONDS = 60.0
_CHECKPOINT_SHARE = 0.1

OnReport = Callable[[StepReport], None]


class Trainer:
    """Trains one drafter for one target on one corpus, and keeps it in `out_dir`.

    `out_dir` holds ``draft/`` (a checkpoint of the best held-out measurement, bfloat16), ``training_state.pt`` and
    ``log.jsonl``. Of several processes the first one writes them, and all read the state of a resumed run.

    Args:
        states: where the target's states of the rows come from; default: the target itself, batch by batch.
        init: a drafter to start from: tensors that fit in name and shape are taken or enlarged, others drawn.

    Raises:
        ConfigError: `out_dir` holds the state of a run with other settings or texts, or a drafter without a state; or
            no tensor of `init` fits, or there are fewer texts per step than processes, or they see different folders.
    """

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        corpus: Corpus,
        held_out: Corpus,
        out_dir: str | Path,
        states: StateSource | None = None,
        init: InitialDrafter | None = None,
        processes: Processes = Processes(),  # noqa: B008 - immutable
    ) -> None:
        _check_settings(config, target, processes)
        self.config = config
        self.corpus = corpus
        self.held_out = held_out
        self.out_dir = Path(out_dir)
        self.device = torch.device(config.device)
        self.progress = Progress()
        self._processes = processes
        self._clock = time.perf_counter()
        self._target = target
        self._states_of = states or ComputedStates(target)
        self._texts = digest(corpus.rows), digest(held_out.rows)
        refuse_finished(self.out_dir)
        self._batches, self._held_out = Batches(config, corpus), Batches(config, held_out).all()
        self._target_lm_head = target.lm_head_weight.to(self.device, config.compute_torch_dtype)
        counts = answer_counts(corpus, target.vocab_size)
        self.vocabulary = LossVocabulary(counts, config.loss_vocab, config.loss_vocab_sampled)
        self._token_ids = _proposed_tokens(config, counts, init)
        state = read_state(self.out_dir, config, self._texts)
        _check_start(self.out_dir, 0 if state is None else state["step"], processes)
        # Weights are drawn on the CPU, so that a seed means the same drafter on every device.
        self.model = DraftModel(config.draft_config(target.config), own_embedding=False, own_lm_head=False)
        self.model.bind_target(target.embed_weight.cpu(), target.lm_head_weight.cpu())
        # The others get its weights.
        if state is None and processes.is_first:
            initialise(self.model, target, self._some_features(), seeded(config.seed, "initialise", 0))
            if init is not None:
                init.give(self.model)
        self.model.to(self.device)
        self.model.bind_target(target.embed_weight.to(self.device), target.lm_head_weight.to(self.device))
        self.optimizer = Optimizer(self.model, config)
        if state is not None:
            self._continue(state)
        processes.wait()  # where it does not count as hanging
        processes.share(self.model.state_dict().values())
        self._sums = Sums(self.model.config.gamma, self.device)
        self._log = Log(self.out_dir, self.step) if processes.is_first else None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.step

    def run(
        self,
        on_report: OnReport | None = None,
        until: int | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> DraftModel:
        """Train to the end (or stop after step `until`) and return the model; `on_step` gets steps done.

        Raises:
            ConfigError: the loss is not a number any more; the last checkpoint before that stays.
        """
        progress, config = self.progress, self.config
        self._clock = time.perf_counter()
        self._look_at_the_clock()
        while not (over := progress.is_over(config)) and (until is None or progress.step < until):
            self._train_step()
            progress.step += 1
            self._look_at_the_clock()
            if progress.step == 1:
                progress.first_seconds = progress.seconds
            if on_step is not None:
                on_step(progress.step)
            if progress.step % config.log_every == 0:
                self._check(self._report(self._sums, False, on_report))
                self._sums = Sums(self.model.config.gamma, self.device)
            if self._checkpoint_is_due():
                self._checkpoint(on_report)
        if over and progress.saved_step != progress.step:
            self._checkpoint(on_report)
        return self.model

    def export(self, directory: str | Path) -> None:
        """Write the drafter as a bfloat16 checkpoint, with copies of embedding and LM head if the settings say so."""
        with torch.device("meta"):
            exported = DraftModel(self.model.config, own_embedding=False, own_lm_head=False)
        weights = {name: weight.to(torch.bfloat16) for name, weight in self.model.state_dict().items()}
        exported.load_state_dict(weights, assign=True)
        if self.config.own_embeddings:
            exported.bind_target(*(w.to(torch.bfloat16) for w in (self._target.embed_weight, self._target_lm_head)))
        save_draft_model(exported, directory, include_embeddings=self.config.own_embeddings)
        if self._token_ids is not None:
            save_token_ids(directory, self._token_ids)

    def _train_step(self) -> None:
        step = self.progress.step
        whole = self._batches.step(step)
        vocabulary = self.vocabulary.draw(seeded(self.config.seed, "vocabulary", step), self.device)
        total_weight = self._weight_of(whole)
        self._sums.add_step(total_weight)
        self.optimizer.zero_grad()
        for piece in self._pieces_of(whole):
            batch = self._collate(piece)
            output = self._loss(batch, vocabulary, total_weight)
            output.loss.backward()
            self._sums.add_piece(output, batch, total_weight)
        self._processes.add_up(map(_gradient, self.model.parameters()))
        position, start = self.progress.position(self.config), self.progress.start(self.config)
        self.optimizer.step(learning_rate_factor(self.config, position, start))

    def _pieces_of(self, whole: Piece) -> Iterator[Piece]:
        most = self.config.micro_batch_rows or self.config.batch_rows
        return pieces_of(whole, most, self._processes.rank, self._processes.count)

    def _weight_of(self, whole: Piece) -> float:
        return weight_of_slots(self.config.loss, supervised_slots(whole, self.model.config.gamma))

    def _loss(self, batch: AnchorBatch, vocabulary: VocabularySlice, total_weight: float) -> LossOutput:
        dtype = self.config.compute_torch_dtype
        autocast = nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype=dtype)
        with autocast:
            return draft_loss(self.model, batch, vocabulary, self._target_lm_head, self.config.loss, total_weight)

    def _look_at_the_clock(self) -> None:
        """All processes go by the clock of the first one; where steps end the run, they need not agree on it."""
        now = time.perf_counter()
        passed, self._clock = now - self._clock, now
        self.progress.seconds += passed if self.config.max_minutes is None else self._processes.agreed(passed)

    def _checkpoint_is_due(self) -> bool:
        if self.config.max_minutes is None:
            return self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps
        interval = max(_CHECKPOINT_SECONDS, self.progress.saving_seconds / _CHECKPOINT_SHARE)
        return self.progress.seconds - self.progress.saved_seconds >= interval

    def _collate(self, piece: Piece) -> AnchorBatch:
        """A piece with the states of its texts, ready for the loss."""
        states = self._states_of(piece.rows)
        dtype = self.config.compute_torch_dtype
        states = TargetStates(states.features.to(self.device, dtype), states.last_hidden.to(self.device, dtype))
        return collate(piece.rows, piece.anchors, states, self.model.config.gamma)

    def _some_features(self) -> Tensor:
        """Tapped features ``[n, m * d]`` of the first rows, on the CPU."""
        rows = self.corpus.rows[:_INIT_ROWS]
        features = self._states_of(rows).features
        return torch.cat([f[: len(row.input_ids) - 1] for f, row in zip(features, rows, strict=True)]).cpu()

    @torch.no_grad()
    def _evaluate(self) -> Sums:
        """Sums over the held-out rows on the whole vocabulary, the same anchors every time."""
        sums = Sums(self.model.config.gamma, self.device)
        total_weight = self._weight_of(self._held_out)
        sums.add_step(total_weight)
        for piece in self._pieces_of(self._held_out):
            batch = self._collate(piece)
            sums.add_piece(self._loss(batch, VocabularySlice(None, None, None), total_weight), batch, total_weight)
        return sums

    def _checkpoint(self, on_report: OnReport | None) -> None:
        began = self.progress.seconds
        held_out = self._report(self._evaluate(), True, on_report)
        self._check(held_out)
        self._look_at_the_clock()
        self.progress.measured(held_out.tau)
        self.progress.saved(began)  # for who goes on from here; writing it takes longer still
        if self._processes.is_first:
            self._save()
        self._processes.wait()
        self._look_at_the_clock()
        self.progress.saved(began)

    def _check(self, report: StepReport) -> None:
        """Refuse to go on with a drafter that computes nothing any more."""
        if not math.isfinite(report.loss):
            best = self.out_dir / DRAFT_DIR
            raise ConfigError(
                f"learning_rate={self.config.learning_rate}: training has diverged before step {self.step}; give a "
                "smaller one and another --output"
                + (f", and --init {best} to go on from the best checkpoint" if best.exists() else "")
            )

    def _report(self, sums: Sums, held_out: bool, on_report: OnReport | None) -> StepReport:
        report = sums.report(self.step, self.progress.seconds, self._processes, held_out=held_out)
        if self._log is not None:
            self._log.write(report)
        if on_report is not None:
            on_report(report)
        return report

    def _save(self) -> None:
        state = {
            "config": self.config.to_dict(),
            "texts": list(self._texts),
            **vars(self.progress),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        with written_whole(self.out_dir / STATE_FILE) as partial:
            torch.save(state, partial)
            # Between a drafter and its state nothing may happen: one without the other is no run to go on with.
            if self.progress.best_step == self.step:
                self.export(self.out_dir / DRAFT_DIR)

    def _continue(self, state: dict[str, Any]) -> None:
        self.progress = Progress.of(state)
        if self._processes.is_first:
            forget_later_steps(self.out_dir / LOG_FILE, self.step)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _check_settings(config: TrainConfig, target: Target, processes: Processes) -> None:
    if target.tap_ids != tuple(config.target_layer_ids):
        raise ConfigError(
            f"target_layer_ids={list(config.target_layer_ids)}, but the target is tapped at {list(target.tap_ids)}"
        )
    if config.batch_rows < processes.count:
        raise ConfigError(
            f"batch_rows={config.batch_rows}: {processes.count} processes share the texts of a step; give each at "
            f"least one, --batch-rows {processes.count}, or start fewer"
        )


def _check_start(out_dir: Path, step: int, processes: Processes) -> None:
    """Every process reads the state of a resumed run itself."""
    if not processes.agree_on(step):
        raise ConfigError(
            f"--output {out_dir}: the processes would go on after different steps, this one after {step}; all machines "
            "need the same folder, so give one that all of them see"
        )


def _gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter, zeros where this process has read nothing."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _proposed_tokens(config: TrainConfig, counts: Tensor, init: InitialDrafter | None) -> list[int] | None:
    """Tokens that the drafter is to propose; None stands for all."""
    if not config.draft_vocabulary:
        return None if init is None else init.token_ids
    if config.draft_vocabulary > len(counts):
        raise ConfigError(
            f"draft_vocabulary={config.draft_vocabulary} is more than the {len(counts)} tokens of the target; leave "
            "it out to propose all"
        )
    return counts.argsort(descending=True, stable=True)[: config.draft_vocabulary].tolist()


def answer_counts(corpus: Corpus, vocab_size: int) -> Tensor:
    """How often each token occurs in the answers: ``[V]`` int64."""
    answers = torch.cat([row.input_ids[row.prompt_len :] for row in corpus.rows])
    return torch.bincount(answers, minlength=vocab_size)
