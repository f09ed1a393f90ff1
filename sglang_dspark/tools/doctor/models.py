"""Checks whether a drafter fits a target, from their files. Tensors are read on the CPU, whatever the server uses."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dspark.errors import CheckpointError, DSparkError
from sglang_dspark.tools.doctor import Finding, one_line

if TYPE_CHECKING:
    from sglang_dspark.draft.model import DraftModel
    from sglang_dspark.draft.resolved import ResolvedDrafter
    from sglang_dspark.engine.feature import LaunchContext


def check_pair(target_dir: Path, draft_dir: Path, command: Sequence[str]) -> Iterator[Finding]:
    """Check a target and its drafter as a start does, then tensors and memory. Stops when something fails.

    Args:
        command: flags of ``sglang.launch_server`` for the pair.
    """
    if drafter := _drafter_in(draft_dir):
        yield from _describe_drafter(drafter)
    try:
        with warnings.catch_warnings(action="ignore"):  # SGLang warns on import of what this machine does not have
            from sglang_dspark.engine import decision

            found = decision.resolve(command)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever ends a start is the finding
        said = str(error) if isinstance(error, DSparkError) else f"SGLang ends the start: {one_line(error)}"
        swapped = f"--target={target_dir} is a drafter; give the model that it was trained for"
        yield Finding("fail", "start", said, swapped if _drafter_in(target_dir) else "")
        return
    yield Finding("ok", "start", "SGLang takes the arguments of the command below")
    if isinstance(found, str):
        yield Finding("note", "engine", found, "SGLang's own worker looks at the drafter when it loads it")
        return
    try:
        yield from _check_models(found, draft_dir)
    except DSparkError as error:
        yield Finding("fail", "pair", str(error))


def _check_models(start: LaunchContext, draft_dir: Path) -> Iterator[Finding]:
    """Describe a pair that our worker serves, and read the drafter's tensors."""
    from sglang_dspark.draft.weights import load_draft_model

    architectures, text = ", ".join(start.target.hf_config.architectures), start.text_config
    sizes = f"hidden size {text.hidden_size}, vocabulary {text.vocab_size}, {text.num_hidden_layers} layers"
    yield Finding("ok", "engine", "plugin: our worker serves the target")
    for said in start.server.adjusted:
        yield Finding("note", "flags", said)
    yield Finding("ok", "target", f"{architectures}: {sizes}, as the drafter expects")
    model = load_draft_model(draft_dir, dtype=start.target.dtype, device="cpu")
    _check_finite(model)
    tensors = f"{sum(1 for _ in model.parameters())} tensors, all expected, all finite"
    yield Finding("ok", "tensors", f"{tensors}; {_describe_memory(model)}")
    drafter = start.server.drafter
    if drafter is None:
        return
    yield Finding("ok", "vocabulary", f"{drafter.num_proposed:,} of {drafter.config.vocab_size:,} tokens are proposed")
    if drafter.reading.storage is not None:
        yield Finding("ok", "quantised", drafter.reading.storage.dequantised(model.parameters()))


def _drafter_in(folder: Path) -> ResolvedDrafter | None:
    """Return the drafter in a folder; None if there is none that can be read."""
    from sglang_dspark.draft.resolved import ResolvedDrafter

    try:
        return ResolvedDrafter.read(folder)
    except DSparkError:
        return None


def _describe_drafter(drafter: ResolvedDrafter) -> Iterator[Finding]:
    from sglang_dspark.draft.formats.description import describe

    reading = drafter.reading
    yield Finding("ok", "drafter", f"{reading.format} format: {describe(reading.config)}")
    for remark in reading.remarks:
        yield Finding("note" if remark.doubtful else "ok", "drafter", remark.sentence)
    if reading.unread_keys:
        unread = ", ".join(reading.unread_keys)
        remedy = "harmless unless one of them changes the network; then drafts are poor, and the text is still right"
        yield Finding("note", "drafter", f"keys of config.json not read: {unread}", remedy)


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
