"""Checks whether a drafter fits a target, from their files. Tensors are read on the CPU, whatever the server uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dspark.calibration.fit import Fit, Verdict
from sglang_dspark.errors import CheckpointError, DSparkError
from sglang_dspark.tools.doctor.finding import Finding, failed, one_line

if TYPE_CHECKING:
    from sglang_dspark.draft.config import DraftConfig
    from sglang_dspark.draft.model import DraftModel
    from sglang_dspark.draft.resolved import ResolvedDrafter
    from sglang_dspark.engine.launch.context import LaunchContext


def check_pair(target_dir: Path, draft_dir: Path) -> Iterator[Finding]:
    """Check a target and its drafter: the checks of a start, then tensors and memory. Stops when one of them fails."""
    from sglang_dspark.draft.families import family_of
    from sglang_dspark.draft.resolved import ResolvedDrafter
    from sglang_dspark.draft.weights import load_draft_model

    is_drafter = _is_drafter(target_dir)
    if not is_drafter and (left := _left_to_sglang(target_dir)) is not None:
        yield left
        return
    try:
        drafter = ResolvedDrafter.read(draft_dir)
    except DSparkError as error:
        swapped = f"--target={target_dir} is a drafter: the two are swapped" if is_drafter else ""
        yield Finding("fail", "drafter", f"--draft: {error}", swapped)
        return
    if is_drafter:
        yield Finding("fail", "target", f"--target={target_dir} is a drafter", "give the model that it was trained for")
        return
    try:
        yield from _describe_drafter(drafter)
        context = _launch(target_dir, drafter)
        launch = list(_launch_checks(context))
        yield from launch
        if failed(launch):
            return
        target = context.target
        architectures = target.hf_config.architectures
        yield Finding("ok", "engine", "plugin: our worker serves the target")
        yield Finding("ok", "target", _describe_target(architectures, context.text_config))
        if remark := family_of(architectures).remark:
            yield Finding("note", "target", remark)
        yield _switches(drafter.config)
        model = load_draft_model(draft_dir, dtype=target.dtype, device="cpu")
        num_tensors = sum(1 for _ in model.parameters())
        _check_finite(model)
        yield Finding("ok", "tensors", f"{num_tensors} tensors, all expected, all finite; {_describe_memory(model)}")
    except DSparkError as error:
        yield Finding("fail", "pair", str(error))


def _left_to_sglang(target_dir: Path) -> Finding | None:
    """Return that SGLang's own worker would serve the target, which looks at the drafter itself; None if ours would."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # SGLang warns on import of what this machine does not have
            from sglang_dspark.engine.launch.diagnosis import why_own_worker

            why = why_own_worker(target_dir)
    except (ImportError, OSError, ValueError):
        return None  # said below
    if why is None:
        return None
    found = f"scheduled: the plugin's worker does not serve {why}"
    if torch.cuda.is_available():
        return Finding("note", "engine", found, "SGLang's own worker serves it by our schedule, and checks the drafter")
    return Finding("fail", "engine", found, "SGLang's own worker, which may serve it, needs a GPU")


def check_start(command: Sequence[str]) -> Finding:
    """Resolve the arguments of a command as the start of a server does: SGLang refuses pairs for reasons of its own.

    Args:
        command: flags of ``sglang.launch_server``.
    """
    from sglang_dspark.engine.launch import diagnosis

    try:
        with warnings.catch_warnings(action="ignore"):
            diagnosis.resolve(command)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever ends a start is the finding
        return Finding("fail", "start", f"SGLang ends the start of such a server: {one_line(error)}")
    return Finding("ok", "start", "SGLang takes the arguments of the command below")


def judge_drafts(replayed: Mapping[str, Any]) -> Finding:
    """Judge a drafter as a server does.

    Args:
        replayed: what came of its drafts along answers of the target, as ``evaluate`` measures it in process.
    """
    rounds = replayed["num_rounds"]
    fit = Fit(rounds, round(rounds * replayed["survival"][0]))
    found = f"{fit.sentence}, accept length {replayed['accept_length']:.2f}"
    match fit.verdict:
        case Verdict.MISFIT:
            return Finding("fail", "drafts", str(fit.warning))
        case Verdict.UNKNOWN:
            return Finding("note", "drafts", found, "too few to say whether the drafter fits: give more prompts")
        case Verdict.FITS:
            return Finding("ok", "drafts", found)


def _is_drafter(folder: Path) -> bool:
    from sglang_dspark.draft.resolved import ResolvedDrafter

    try:
        ResolvedDrafter.read(folder)
    except DSparkError:
        return False
    return True


def _describe_drafter(drafter: ResolvedDrafter) -> Iterator[Finding]:
    from sglang_dspark.draft.formats.description import describe

    reading = drafter.reading
    yield Finding("ok", "drafter", f"{reading.format} format: {describe(reading.config)}")
    for remark in reading.remarks:
        yield Finding("note" if remark.doubtful else "ok", "drafter", remark.sentence)
    if reading.unknown_keys:
        unknown = ", ".join(reading.unknown_keys)
        remedy = "harmless unless one of them changes the network; then drafts are poor, and the text is still right"
        yield Finding("note", "drafter", f"unknown keys in config.json: {unknown}", remedy)


def _launch(target_dir: Path, drafter: ResolvedDrafter) -> LaunchContext:
    """Return the facts that the checks of a start look at.

    Raises:
        CheckpointError: the target, or SGLang itself, cannot be read.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # SGLang warns on import of what this machine does not have
            from sglang_dspark.engine.launch.diagnosis import launch_without_flags

            return launch_without_flags(target_dir, drafter)
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(f"{target_dir}: SGLang cannot read this as a target ({one_line(error)})") from error


def _launch_checks(context: LaunchContext) -> Iterator[Finding]:
    """Make the checks of a start that need no flags, and name the others."""
    from sglang_dspark.engine.launch.check import Stage
    from sglang_dspark.engine.launch.checks import all_checks

    made = [check for check in all_checks() if check.stage is Stage.MODELS]
    messages = {check.name: message for check in made if (message := check.message(context))}
    for name, message in messages.items():
        yield Finding("fail", name, message)
    passed = ", ".join(check.name for check in made if check.name not in messages)
    others = ", ".join(check.name for check in all_checks() if check not in made)
    yield Finding("ok", "start-up", f"passed: {passed}", f"the server also checks, with its flags: {others}")


def _switches(draft: DraftConfig) -> Finding:
    """Return the differences between the drafter's network and DeepSpec's."""
    from sglang_dspark.draft.formats.description import switches

    found = "; ".join(f"{switch.name}: {switch.words}" for switch in switches(draft))
    return Finding("ok", "switches", found or "none: the network is DeepSpec's")


def _describe_target(architectures: Sequence[str], target: Any) -> str:
    return (
        f"{', '.join(architectures)}: hidden size {target.hidden_size}, vocabulary {target.vocab_size}, "
        f"{target.num_hidden_layers} layers, as the drafter expects"
    )


def _describe_memory(model: DraftModel) -> str:
    from sglang_dspark.draft.cache import bytes_per_token

    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size_mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
    dtype = model.fc.weight.dtype
    per_token = bytes_per_token(model.config, dtype)
    return (
        f"{count:,} parameters ({size_mib:,.1f} MiB as {str(dtype).removeprefix('torch.')}), "
        f"draft K/V {per_token:,} bytes per token"
    )


def _check_finite(model: DraftModel) -> None:
    import torch

    broken = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if broken:
        raise CheckpointError(
            f"{model.config.origin}: NaN or infinite values in {', '.join(broken)}; take an intact checkpoint"
        )
