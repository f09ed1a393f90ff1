"""Make a drafter for a target: texts, training, evaluation; each stage resumes an earlier run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_training.corpus import TextFolder, Texts
from dspark_training.initial_drafter import InitialDrafter, initial_config, shape_of
from dspark_training.prompt_format import PromptFormat
from dspark_training.replay import AcceptanceReport, replay
from dspark_training.report import StepReport
from dspark_training.settings import TextPlan, TrainConfig
from dspark_training.target import Target, check_tap_ids, stop_ids_of
from dspark_training.target_defaults import MaskTokens, default_depth, default_taps
from dspark_training.texts import Text, keep_states, padded_ids, states_of
from dspark_training.trainer import DRAFT_DIR, Trainer, answer_counts, refuse_finished
from dspark_training.writers import InProcessWriter, ServerWriter
from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.draft.families import FAMILIES
from sglang_dspark.draft.reduced_vocabulary import load_token_ids
from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.errors import ConfigError
from sglang_dspark.files import atomic_write_text
from sglang_dspark.tools.launch import LaunchedServer

EVALUATION_FILE = "evaluation.json"
# Greedy texts must be the target's own. In another precision a near-tie may fall the other way, so a token agrees when
# it is at least half as likely as the first choice; this share of the tokens of some texts has to.
_CHECKED_TEXTS = 8
_MIN_RATIO = 0.5
_MIN_AGREEMENT = 0.9
# Tokens that go through the target together for states that are kept.
_STATES_BATCH_TOKENS = 16_384
# Of a server of our own, which may have to fetch the target from the hub first.
_STARTUP_TIMEOUT_S = 7200.0
_TOLD_EVERY_S = 30.0  # in a file


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Everything that the command can be told."""

    target: str  # checkpoint folder or name on the Hugging Face hub
    output: Path
    corpus: Path
    plan: TextPlan
    plan_given: frozenset[str]  # fields of the plan that the user set
    store_states: bool
    server: str | None
    api_key: str | None
    concurrency: int
    taps: tuple[int, ...] | None
    layers: int | None
    mask_token_id: int | None
    init: str | None  # drafter to start from, a folder or a name on the hub
    settings: dict[str, Any]  # further fields of `TrainConfig`
    given: frozenset[str]  # options that the user set: of the others, `init` decides about the shape


class Display:
    """One bar per stage; lines that stay above them. Where there is no terminal, a line now and then."""

    def __init__(self, console: Console) -> None:
        bar, note = BarColumn(bar_width=16), TextColumn("{task.fields[note]}")
        columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeRemainingColumn(), note)
        self._bars = Progress(*columns, console=console)
        self._console = console
        self._stage = ""
        self._told_at = float("-inf")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def progress(self, stage: str, done: int, total: int, note: str = "") -> None:
        """Show that `done` of `total` of a stage are finished."""
        if stage != self._stage:
            self._stage = stage
            self._told_at = float("-inf")
            self._task = self._bars.add_task(stage, total=total, note=note)
        self._bars.update(self._task, completed=done, total=total, note=note)
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told_at >= _TOLD_EVERY_S:
            self._told_at = now
            self.say(f"{stage}: {done} of {total} {note}".rstrip())

    def say(self, text: str) -> None:
        """Show a line that stays."""
        self._console.print(text, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class Evaluation:
    """Accept lengths of the finished checkpoint on held-out texts."""

    greedy: AcceptanceReport
    sampled: AcceptanceReport


def train(job: TrainJob, display: Display, accelerator: Accelerator) -> Evaluation:
    """Run all stages of `job`; of several processes the first one writes texts and files.

    Raises:
        ConfigError: the target cannot be loaded or tapped, the texts are not its own, or a setting contradicts what the
            output folder was begun with.
        CheckpointError: shape of the drafter and target do not go together.
    """
    refuse_finished(job.output)
    target_config = _read_target_config(job.target)
    like = None if job.init is None else initial_config(job.init, target_config)
    layers = target_config.num_hidden_layers
    taps = job.taps or (default_taps(layers) if like is None else like.target_layer_ids)
    check_tap_ids(taps, layers)
    _say_if_not_served(target_config, display)
    folder = TextFolder(job.corpus, job.plan, job.plan_given)
    prompt_format = PromptFormat.from_pretrained(
        job.target, raw=folder.plan.raw, template_kwargs=folder.plan.chat_template_kwargs
    )
    target = None
    if accelerator.is_main_process and not folder.is_written:
        target = _write_texts(job, folder, taps, target_config.vocab_size, prompt_format, display, accelerator.device)
    accelerator.wait_for_everyone()
    target = target or _load_target(job, taps, accelerator.device, display)
    texts = TextFolder(job.corpus, job.plan, job.plan_given).load()
    _check_agreement(target, texts.greedy, job.corpus)
    tokens = sum(len(text.input_ids) - text.prompt_len for text in texts.train)
    display.say(f"{len(texts.train)} texts with {tokens} answer tokens to train on")
    config = _train_config(job, target, taps, prompt_format, texts, like)
    train_texts, held_out = texts.train, texts.greedy + texts.sampled
    if job.store_states:
        display.say("running the target over the texts")
        train_texts, held_out = (
            keep_states(target, part, batch_tokens=_STATES_BATCH_TOKENS) for part in (train_texts, held_out)
        )
    init = None if job.init is None else InitialDrafter.load(job.init)
    trainer = Trainer(config, target, train_texts, held_out, job.output, accelerator, init)
    _describe(trainer, init, display)
    _train(trainer, display)
    # The others have nothing to wait for: they measure the same.
    evaluation = _evaluate(job, target, texts, folder.plan.max_tokens, display)
    content = {"target": job.target, "steps": trainer.progress.step, "best_step": trainer.progress.best_step}
    content |= {name: report.to_dict() for name, report in vars(evaluation).items()}
    if accelerator.is_main_process:
        atomic_write_text(job.output / EVALUATION_FILE, json.dumps(content, indent=2) + "\n")
    return evaluation


def _read_target_config(path: str) -> Any:
    """Return the target's transformers text configuration.

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


def _write_texts(
    job: TrainJob,
    folder: TextFolder,
    taps: tuple[int, ...],
    vocab_size: int,
    prompt_format: PromptFormat,
    display: Display,
    device: torch.device,
) -> Target | None:
    """Make the texts that are not there yet, and return the target if it has written them in this process."""
    given = folder.read_prompts()
    if job.server is None and device.type != "cuda":
        target = _load_target(job, taps, device, display)
        folder.write(given, InProcessWriter(target), prompt_format, display.progress)
        return target
    # The target is not loaded before the texts are there: the server may have filled the device.
    with ExitStack() as own:
        url = job.server
        if url is None:
            flags = ("--base-gpu-id", str(device.index or 0), "--dtype", job.settings["compute_dtype"])
            display.say(f"starting an SGLang server of {job.target}")
            url = own.enter_context(LaunchedServer(job.target, *flags, startup_timeout_s=_STARTUP_TIMEOUT_S)).url
        stop_ids = stop_ids_of(job.target)
        writer = ServerWriter(url, stop_ids, vocab_size, concurrency=job.concurrency, api_key=job.api_key)
        folder.write(given, writer, prompt_format, display.progress)
    return None


def _load_target(job: TrainJob, taps: tuple[int, ...], device: torch.device, display: Display) -> Target:
    dtype: torch.dtype = getattr(torch, job.settings["compute_dtype"])
    display.say(f"loading {job.target} on {device} in {job.settings['compute_dtype']}")
    return Target.from_pretrained(job.target, taps, dtype=dtype, device=str(device))


def _say_if_not_served(config: Any, display: Display) -> None:
    architectures = config.architectures or [config.model_type]
    served = [family.architecture for family in FAMILIES]
    if not set(architectures) & set(served):
        display.say(
            f"{', '.join(architectures)} is not among the targets that this release serves with DSPARK "
            f"({', '.join(served)}); the drafter can be trained and measured all the same"
        )


def _check_agreement(target: Target, greedy: Sequence[Text], folder: Path) -> None:
    """Refuse texts that another model has written.

    Raises:
        ConfigError: too many of their tokens are not the target's first choice.
    """
    texts = greedy[:_CHECKED_TEXTS]
    states = states_of(target, texts)
    agreed = total = 0
    for text, ids, hidden in zip(texts, padded_ids(texts).to(target.device), states.last_hidden, strict=True):
        answer = slice(text.prompt_len, len(text.input_ids))
        before = slice(text.prompt_len - 1, len(text.input_ids) - 1)
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
    """Settle what the job leaves open: depth and mask token, and the shape as in `like`."""
    counts = answer_counts(texts.train + texts.greedy + texts.sampled, target.vocab_size)
    masks = MaskTokens(prompt_format.tokenizer, target.embed_weight, target.stop_ids, counts)
    mask = job.mask_token_id
    if mask is not None:
        masks.check(mask)
    else:
        mask = masks.default() if like is None else like.mask_token_id
    values: dict[str, Any] = {"num_layers": job.layers or default_depth(target.num_layers)} | job.settings
    if like is not None:
        given = {"num_layers" if name == "layers" else name for name in job.given}
        values |= {name: value for name, value in shape_of(like).items() if name not in given}
    return TrainConfig(**(values | {"target_layer_ids": taps, "mask_token_id": mask}))


def _describe(trainer: Trainer, init: InitialDrafter | None, display: Display) -> None:
    config = trainer.config
    trained = sum(parameter.numel() for parameter in trainer.model.parameters())
    display.say(
        f"drafter: block size {config.block_size}, {config.num_layers} layers, taps {list(config.target_layer_ids)}, "
        f"mask token {config.mask_token_id}, {trained / 1e6:.1f} M parameters to train"
    )
    if trainer.progress.step:
        display.say(f"continuing after step {trainer.progress.step}")
    elif init is not None:
        display.say(init.account(trainer.model))


def _train(trainer: Trainer, display: Display) -> None:
    steps, note = trainer.config.steps, ""

    def on_report(report: StepReport) -> None:
        nonlocal note
        note = f"loss {report.loss:.2f}, estimated accept length {report.tau:.2f}"
        if report.held_out:
            display.say(f"step {report.step}, held out: {note}")

    display.progress("training", trainer.progress.step, steps)
    trainer.run(on_report, lambda step: display.progress("training", step, steps, note))
    if trainer.progress.worse:
        best = trainer.progress.best_step
        display.say(f"the drafter of step {best} is kept: no later one did better on held-out texts")


def _evaluate(job: TrainJob, target: Target, texts: Texts, max_tokens: int, display: Display) -> Evaluation:
    """Measure the checkpoint as it was written, not the weights in memory."""
    model = load_draft_model(job.output / DRAFT_DIR, dtype=target.dtype, device=str(target.device))
    model.bind_target(target.embed_weight, target.lm_head_weight, embed_scale=target.embed_scale)
    # A round that starts later could be cut short by the end of a text that has no stop token.
    limit = max(1, max_tokens - model.config.gamma - 1)
    token_ids = load_token_ids(job.output / DRAFT_DIR, target.vocab_size)
    reports = []
    for number, (part, temperature) in enumerate(((texts.greedy, 0.0), (texts.sampled, 1.0))):
        display.progress("measuring", number, 2)
        reports.append(replay(model, target, part, temperature=temperature, max_new_tokens=limit, token_ids=token_ids))
    display.progress("measuring", 2, 2)
    return Evaluation(*reports)
