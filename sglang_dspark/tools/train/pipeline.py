"""From a target to a drafter: texts, training, evaluation; each stage goes on where an earlier run stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import write_text_whole
from sglang_dspark.tools.train.config import TrainConfig
from sglang_dspark.tools.train.corpus import Corpus
from sglang_dspark.tools.train.dry_run import Forecast, forecast
from sglang_dspark.tools.train.evaluate import AcceptanceReport, replay
from sglang_dspark.tools.train.initial_drafter import InitialDrafter, shape_of
from sglang_dspark.tools.train.job import TrainJob, prepare
from sglang_dspark.tools.train.memory import training_bytes
from sglang_dspark.tools.train.parallel import Processes
from sglang_dspark.tools.train.prompt_format import PromptFormat
from sglang_dspark.tools.train.reports import StepReport, has_tensorboard
from sglang_dspark.tools.train.rows import (
    ComputedStates,
    CorpusRow,
    StateSource,
    keep_states,
    kept_bytes,
    padded_ids,
    stored_states,
)
from sglang_dspark.tools.train.run_folder import DRAFT_DIR, LOG_FILE
from sglang_dspark.tools.train.server_writer import OwnServerWriter, ServerWriter
from sglang_dspark.tools.train.target import Target, stop_ids_of
from sglang_dspark.tools.train.target_defaults import MaskTokens, default_depth
from sglang_dspark.tools.train.text_folder import TextFolder, Texts
from sglang_dspark.tools.train.text_writer import InProcessWriter
from sglang_dspark.tools.train.trainer import Trainer, answer_counts

EVALUATION_FILE = "evaluation.json"
# Greedy texts must be the target's own. In another precision a near-tie may fall the other way, so a token agrees when
# it is at least half as likely as the first choice; this share of the tokens of some rows has to.
_CHECKED_ROWS = 8
_MIN_RATIO = 0.5
_MIN_AGREEMENT = 0.9
# Of what training leaves free of a GPU's memory, for the states of all texts; and tokens that go through the target
# together for them.
_STATES_SHARE = 0.8
_STATES_BATCH_TOKENS = 16_384


class Display(Protocol):
    """Where progress goes."""

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """`done` of `total` of a stage are finished."""

    def say(self, text: str) -> None:
        """One line that stays."""


@dataclass(frozen=True)
class Evaluation:
    """Accept lengths of the finished checkpoint on held-out texts."""

    greedy: AcceptanceReport
    sampled: AcceptanceReport


def train(job: TrainJob, display: Display, processes: Processes) -> Evaluation:
    """Run all stages of `job`; of several processes the first one writes texts and files.

    Raises:
        ConfigError: the target cannot be loaded or tapped, the texts are not its own, or a setting contradicts what the
            output folder was begun with.
        CheckpointError: shape of the drafter and target do not go together.
    """
    prepared = prepare(job)
    target_config, like, taps, folder = prepared.target_config, prepared.like, prepared.taps, prepared.folder
    _say_if_not_served(target_config, display)
    stored = folder.plan.stored_taps
    _check_stored(job, stored, taps)
    prompt_format = PromptFormat.from_pretrained(
        job.target, raw=folder.plan.raw, template_kwargs=folder.plan.chat_template_kwargs
    )
    target = None
    if processes.is_first:
        target = _write_texts(job, folder, taps, target_config.vocab_size, prompt_format, display)
    processes.wait()
    target = target or _load_target(job, taps, display)
    texts = folder.load()
    _check_agreement(target, texts.greedy, job.corpus)
    display.say(f"{len(texts.train)} texts with {texts.train.num_answer_tokens} answer tokens to train on")
    config = _train_config(job, target, taps, prompt_format, texts, like)
    held_out = Corpus(texts.greedy.rows + texts.sampled.rows)
    states: StateSource = stored_states
    if stored is None:
        states = ComputedStates(target)
        if _fit_with_states(config, target, texts.train.rows + held_out.rows, processes.count):
            train_texts, held_out = (_with_states(target, corpus, display) for corpus in (texts.train, held_out))
            texts, states = replace(texts, train=train_texts), stored_states
    init = None if job.init is None else InitialDrafter.load(job.init)
    trainer = Trainer(config, target, texts.train, held_out, job.output, states, init, processes)
    _describe(trainer, init, display)
    _train(trainer, display)
    # The others have nothing to wait for: they measure the same.
    evaluation = _evaluate(job, target, texts, folder.plan.max_tokens, display)
    content = {"target": job.target, "steps": trainer.step, "best_step": trainer.progress.best_step}
    content |= {name: report.to_dict() for name, report in vars(evaluation).items()}
    if processes.is_first:
        write_text_whole(job.output / EVALUATION_FILE, json.dumps(content, indent=2) + "\n")
    return evaluation


def foretell(job: TrainJob, processes: int) -> tuple[Forecast, TrainConfig]:
    """What `job` would take, and its settings; the mask token, which the texts decide about, is any.

    Raises:
        ConfigError: as `train`, as far as configurations and prompts tell.
    """
    prepared = prepare(job)
    target_config = prepared.target_config
    config = train_config(job, target_config.num_hidden_layers, prepared.taps, 0, prepared.like)
    return forecast(prepared.folder.plan, job.corpus, config, target_config, processes), config


def _write_texts(
    job: TrainJob,
    folder: TextFolder,
    taps: tuple[int, ...],
    vocab_size: int,
    prompt_format: PromptFormat,
    display: Display,
) -> Target | None:
    """Make the texts that are not there yet, and return the target where it has written them in this process."""
    folder.check_prompts()
    keep_states = folder.plan.stored_taps is not None
    if job.writes_in_process or keep_states:
        target = _load_target(job, taps, display)
        folder.write(InProcessWriter(target, keep_states=keep_states), prompt_format, display.progress)
        return target
    # The target is not loaded before the texts are there: the server may have filled the device.
    ids = stop_ids_of(job.target)
    if job.server is not None:
        writer = ServerWriter(job.server, ids, vocab_size, concurrency=job.concurrency, api_key=job.api_key)
        folder.write(writer, prompt_format, display.progress)
        return None
    with OwnServerWriter(job.target, job.device, job.compute_dtype, ids, vocab_size, job.concurrency) as own:
        folder.write(own, prompt_format, display.progress)
    return None


def _check_stored(job: TrainJob, stored: tuple[int, ...] | None, taps: tuple[int, ...]) -> None:
    """Refuse options that contradict what the texts in the folder keep."""
    if stored is None and job.store_states:
        raise ConfigError(
            f"--store-states: the texts in {job.corpus} were begun without states; drop it, or give another --corpus"
        )
    if stored is not None and job.server is not None:
        raise ConfigError(
            f"--server {job.server}: the texts in {job.corpus} keep states, which a server does not give; drop it, or "
            "give another --corpus"
        )
    if stored is not None and stored != taps:
        raise ConfigError(
            f"--taps {','.join(map(str, taps))}: the texts in {job.corpus} keep the states of layers "
            f"{','.join(map(str, stored))}; give these, or another --corpus"
        )


def _load_target(job: TrainJob, taps: tuple[int, ...], display: Display) -> Target:
    display.say(f"loading {job.target} on {job.device} in {job.compute_dtype}")
    return Target.from_pretrained(job.target, taps, dtype=job.dtype, device=job.device)


def _say_if_not_served(config: Any, display: Display) -> None:
    architectures = config.architectures or [config.model_type]
    served = [family.architecture for family in FAMILIES]
    if not set(architectures) & set(served):
        display.say(
            f"{', '.join(architectures)} is not among the targets that this release serves with DSPARK "
            f"({', '.join(served)}); the drafter can be trained and measured all the same"
        )


def _check_agreement(target: Target, greedy: Corpus, folder: Path) -> None:
    """Refuse texts that another model has written.

    Raises:
        ConfigError: too many of their tokens are not the target's first choice.
    """
    rows = greedy.rows[:_CHECKED_ROWS]
    states = ComputedStates(target)(rows)
    agreed = total = 0
    for row, ids, hidden in zip(rows, padded_ids(rows).to(target.device), states.last_hidden, strict=True):
        answer = slice(row.prompt_len, len(row.input_ids))
        before = slice(row.prompt_len - 1, len(row.input_ids) - 1)
        logits = target.logits(hidden[before])
        deficit = logits.amax(-1) - logits.gather(-1, ids[answer, None])[:, 0]
        agreed += int((deficit <= -math.log(_MIN_RATIO)).sum())
        total += len(deficit)
    if agreed < _MIN_AGREEMENT * total:
        raise ConfigError(
            f"--corpus {folder}: only {agreed / total:.0%} of its greedy tokens are a likely choice of --target, so "
            "another model wrote them; check what --server serves, and begin a new --corpus"
        )


def _train_config(
    job: TrainJob,
    target: Target,
    taps: tuple[int, ...],
    prompt_format: PromptFormat,
    texts: Texts,
    like: DraftConfig | None,
) -> TrainConfig:
    counts = [answer_counts(corpus, target.vocab_size) for corpus in (texts.train, texts.greedy, texts.sampled)]
    masks = MaskTokens(prompt_format.tokenizer, target.embed_weight, target.stop_ids, torch.stack(counts).sum(0))
    if job.mask_token_id is not None:
        masks.check(job.mask_token_id)
    mask = job.mask_token_id
    if mask is None:
        mask = masks.default() if like is None else like.mask_token_id
    return train_config(job, target.num_layers, taps, mask, like)


def train_config(
    job: TrainJob, target_layers: int, taps: tuple[int, ...], mask: int, like: DraftConfig | None
) -> TrainConfig:
    """The settings of a job; what it leaves open about the drafter's shape is as in `like`."""
    values: dict[str, Any] = {"num_layers": job.layers or default_depth(target_layers)} | job.settings
    if like is not None:
        given = {"num_layers" if name == "layers" else name for name in job.given}
        values |= {name: value for name, value in shape_of(like).items() if name not in given}
    fixed = {"target_layer_ids": taps, "mask_token_id": mask}
    return TrainConfig(device=job.device, compute_dtype=job.compute_dtype, **(values | fixed))


def _fit_with_states(config: TrainConfig, target: Target, rows: Sequence[CorpusRow], processes: int = 1) -> bool:
    """Whether a GPU has room for the states of all texts; a CPU's memory is the user's to give (--store-states)."""
    if target.device.type != "cuda":
        return False
    torch.cuda.empty_cache()  # what decoding has left
    free, _ = torch.cuda.mem_get_info(target.device)
    longest = max(len(row.input_ids) for row in rows)
    needed = training_bytes(config, target.config, longest, processes).total
    return kept_bytes(target, rows) <= _STATES_SHARE * (free - needed)


def _with_states(target: Target, corpus: Corpus, display: Display) -> Corpus:
    def on_progress(done: int, total: int) -> None:
        display.progress("running the target over the texts", done, total)

    return Corpus(keep_states(target, corpus.rows, batch_tokens=_STATES_BATCH_TOKENS, on_progress=on_progress))


def _describe(trainer: Trainer, init: InitialDrafter | None, display: Display) -> None:
    config = trainer.config
    trained = sum(parameter.numel() for parameter in trainer.model.parameters())
    display.say(
        f"drafter: block size {config.block_size}, {config.num_layers} layers, taps {list(config.target_layer_ids)}, "
        f"mask token {config.mask_token_id}, {trained / 1e6:.1f} M parameters to train"
    )
    if not has_tensorboard():
        display.say(f"{LOG_FILE} alone, without curves for TensorBoard: the package tensorboard is not installed")
    if trainer.step:
        display.say(f"continuing after step {trainer.step}")
    elif init is not None:
        display.say(init.account(trainer.model))


def _train(trainer: Trainer, display: Display) -> None:
    config, progress, note = trainer.config, trainer.progress, ""

    def on_report(report: StepReport) -> None:
        nonlocal note
        if report.held_out:
            said = f"loss {report.loss:.3f}, estimated accept length {report.tau:.2f}"
            display.say(f"step {report.step}, held out: {said}")
        else:
            note = f"loss {report.loss:.2f}, estimated accept length {report.tau:.2f}"
            display.progress("training", *progress.shown(config), note)

    display.progress("training", *progress.shown(config))
    trainer.run(on_report, on_step=lambda step: display.progress("training", *progress.shown(config), note))
    if progress.worse:
        display.say(f"the drafter of step {progress.best_step} is kept: no later one did better on held-out texts")


def _evaluate(job: TrainJob, target: Target, texts: Texts, max_tokens: int, display: Display) -> Evaluation:
    """Accept lengths of the checkpoint as it was written, not of the weights in memory."""
    model = load_draft_model(job.output / DRAFT_DIR, dtype=job.dtype, device=job.device)
    model.bind_target(target.embed_weight, target.lm_head_weight)
    # A round that starts later could be cut short by the end of a text that has no stop token.
    limit = max(1, max_tokens - model.config.gamma - 1)
    token_ids = load_token_ids(job.output / DRAFT_DIR, target.vocab_size)
    reports = []
    for number, (corpus, temperature) in enumerate(((texts.greedy, 0.0), (texts.sampled, 1.0))):
        display.progress("measuring", number, 2)
        report = replay(
            model,
            target,
            corpus.rows,
            ComputedStates(target),
            temperature=temperature,
            max_new_tokens=limit,
            token_ids=token_ids,
        )
        reports.append(report)
    display.progress("measuring", 2, 2)
    return Evaluation(*reports)
