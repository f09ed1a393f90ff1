"""Can this machine serve this pair of models with DSPARK, and if not, why?

Every check yields :class:`Finding` objects, which the command line prints. If SGLang is missing or is another release,
a check says what it could not look at. Pairs get the checks that a start makes (:mod:`sglang_dspark.engine.checks`).
Tensors are read on the CPU, whatever the server uses.
"""

from __future__ import annotations

import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sglang_dspark import __version__, on_cpu
from sglang_dspark.engine import support
from sglang_dspark.errors import CheckpointError, DSparkError, EngineError

if TYPE_CHECKING:
    from sglang_dspark.draft.model import DraftModel
    from sglang_dspark.draft.weights import ResolvedDrafter
    from sglang_dspark.engine.feature import LaunchContext


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was looked at, what was found, and what to do if that is not enough."""

    status: Literal["ok", "note", "fail"]
    subject: str
    found: str
    remedy: str = ""


def one_line(error: BaseException) -> str:
    """Return kind and text of an exception without line breaks."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")


PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_VALUE = "sglang_dspark.plugin:register"
PACKAGES = ("torch", "triton", "transformers")


def check_versions() -> Iterator[Finding]:
    """Check Python, SGLang, and the packages that both rely on."""
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "sglang-dspark", __version__)
    try:
        sglang_version = support.installed_sglang()
        support.check_sglang_version(sglang_version)
        yield Finding("ok", "sglang", f"{sglang_version}, a release that the plugin serves on")
    except EngineError as error:
        yield Finding("fail", "sglang", str(error))
    for name in PACKAGES:
        try:
            yield Finding("ok", name, version(name))
        except PackageNotFoundError:
            yield Finding("fail", name, "not installed", support.INSTALL_SGLANG)


def check_plugin() -> Iterator[Finding]:
    """Check that the entry point is found and loads, and that DSPARK is registered in this process."""
    found = [point for point in entry_points(group=PLUGIN_GROUP) if point.value == PLUGIN_VALUE]
    if not found:
        missing = f"SGLang does not find the plugin: the entry points {PLUGIN_GROUP} do not list {PLUGIN_VALUE}"
        yield Finding("fail", "entry point", missing, "run pip install --no-deps . in the repository of sglang-dspark")
        return
    yield Finding("ok", "entry point", f"SGLang finds the plugin: {found[0].name} = {found[0].value}")
    try:
        with warnings.catch_warnings(action="ignore"):  # SGLang warns on import of what this machine does not have
            found[0].load()()  # directly first, because SGLang would only log what it raises
            from sglang_dspark.engine import start
    except Exception as error:  # noqa: BLE001 - whatever a foreign SGLang raises on import is the finding
        said = f"SGLang cannot load the plugin: {one_line(error)}"
        yield Finding("fail", "registration", said, f"run: {support.INSTALL_SGLANG}")
        return
    allowed, name = start.plugin_filter(), found[0].name
    if allowed is not None and name not in [each.strip() for each in allowed.split(",")]:
        remedy = f"add {name} to SGLANG_PLUGINS, or unset it"
        yield Finding("fail", "registration", f"SGLANG_PLUGINS={allowed} keeps the plugin out", remedy)
        return
    known = f"the plugin has loaded, and SGLang knows {support.COMMON_NAME} and its flags"
    yield Finding("ok", "registration", known)


def check_hooks() -> Iterator[Finding]:
    """Check the functions of SGLang that are patched. Imports the whole engine, which takes a while."""
    with warnings.catch_warnings(action="ignore"):
        try:
            from sglang_dspark.engine import start
        except Exception as error:  # noqa: BLE001 - as above
            yield Finding("fail", "hooks", f"the plugin cannot be imported: {one_line(error)}", support.INSTALL_SGLANG)
            return
        for hook, problem in start.known_hooks():
            subject = f"hook {hook.name}"
            if problem is None:
                found = f"{hook.target} is there; it is patched ({hook.kind.value}, {hook.where}): {hook.reason}"
                yield Finding("ok", subject, found)
            else:
                yield Finding("fail", subject, problem, support.INSTALL_SGLANG)


def check_sglang(folder: Path | None) -> Iterator[Finding]:
    """Compare every name of SGLang that the plugin uses with the release that is served. Imports nothing of SGLang.

    Args:
        folder: an unpacked wheel, or ``python/`` of a checkout; None for the installed SGLang.
    """
    from sglang_dspark.tools import sglang_names

    try:
        found = sglang_names.drifts(folder or sglang_names.installed())
    except EngineError as error:
        yield Finding("fail", "sglang names", str(error))
        return
    for drift in found:
        change = f"is gone; it was {drift.served}" if drift.form is None else f"was {drift.served} and is {drift.form}"
        places = ", ".join(drift.places[:3]) + (f" and {len(drift.places) - 3} more" if drift.places[3:] else "")
        said = f"{drift.name} {change}; used in {places}"
        yield Finding("fail" if drift.breaks else "note", "/".join(sorted(drift.kinds)), said)
    known = sglang_names.served().values()
    num_read, num_broken = sum(form is not None for form in known), sum(drift.breaks for drift in found)
    counts = (
        f"of {len(known)} names of SGLang that the plugin uses, {num_read - len(found)} are as in the release that is "
        f"served, {num_broken} break the plugin, {len(found) - num_broken} changed harmlessly, and "
        f"{len(known) - num_read} cannot be read"
    )
    yield Finding("note" if num_broken else "ok", "sglang names", counts)


def check_device() -> Iterator[Finding]:
    """Check the accelerator that a server would use."""
    try:
        import torch
    except ImportError as error:
        yield Finding("fail", "device", f"torch cannot be imported: {one_line(error)}", "reinstall torch")
        return
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory_gib = properties.total_memory / 2**30
            capability = properties.major, properties.minor
            refusal = support.gpu_refusal(capability, rocm=torch.version.hip is not None)
            known = f"{properties.name}, {memory_gib:.0f} GiB, sm_{properties.major}{properties.minor}"
            yield Finding("fail" if refusal else "ok", f"cuda:{index}", known, refusal or "")
        if on_cpu.is_enabled():
            yield Finding("ok", "enable-cpu", "has no effect here: SGLang's own kernels serve the GPU")
        return
    yield _check_cpu(f"no CUDA GPU is visible; threads of the CPU: {torch.get_num_threads()}")


def _check_cpu(known: str) -> Finding:
    if not on_cpu.stands_in():
        found = f"{known}; SGLang loads the installed {on_cpu.KERNELS}"
        remedy = f"to serve on the CPU, set {on_cpu.VARIABLE}=1 in the environment and pass --device cpu"
        return Finding("note", "device", found, remedy)
    if not on_cpu.is_enabled():
        found = f"{known}; SGLang's kernel package is built only for GPUs"
        return Finding("fail", "device", found, "to serve on the CPU, run: sglang-dspark enable-cpu")
    found = f"{known}; SGLang serves on the CPU, with a module of sglang-dspark in place of its kernel package"
    return Finding("note", "device", found)


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
    yield Finding("ok", "start", "a server of this pair passes all checks that come before weights are loaded")
    if isinstance(found, str):
        yield Finding("note", "engine", found, "doctor checks a drafter only for the plugin's worker")
        return
    try:
        yield from _check_models(found, draft_dir)
    except DSparkError as error:
        yield Finding("fail", "tensors", str(error))


def _check_models(start: LaunchContext, draft_dir: Path) -> Iterator[Finding]:
    """Describe a pair that our worker serves, and read the drafter's tensors."""
    from sglang_dspark.draft.weights import load_draft_model

    architectures, text = ", ".join(start.target.hf_config.architectures), start.text_config
    sizes = f"hidden size {text.hidden_size}, vocabulary {text.vocab_size}, {text.num_hidden_layers} layers"
    yield Finding("ok", "engine", "the plugin's worker decodes")
    for said in start.server.adjusted:
        yield Finding("note", "flags", said)
    yield Finding("ok", "target", f"{architectures} is served, and the drafter fits it: {sizes}")
    model = load_draft_model(draft_dir, dtype=start.target.dtype, device="cpu")
    if broken := [name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all())]:
        raise CheckpointError(
            f"{model.config.origin}: NaN or infinite values in {', '.join(broken)}; take an intact checkpoint"
        )
    tensors = f"the drafter's {sum(1 for _ in model.parameters())} tensors are complete and finite"
    yield Finding("ok", "tensors", f"{tensors}: {_describe_memory(model)}")
    drafter = start.server.drafter
    if drafter is None:
        return
    proposed = f"the drafter proposes {drafter.num_proposed:,} of the target's {drafter.config.vocab_size:,} tokens"
    yield Finding("ok", "vocabulary", proposed)
    if drafter.reading.storage is not None:
        yield Finding("ok", "quantised", drafter.reading.storage.dequantised(model.parameters()))


def _drafter_in(folder: Path) -> ResolvedDrafter | None:
    """Return the drafter in a folder; None if there is none that can be read."""
    from sglang_dspark.draft.weights import ResolvedDrafter

    try:
        return ResolvedDrafter.read(folder)
    except DSparkError:
        return None


def _describe_drafter(drafter: ResolvedDrafter) -> Iterator[Finding]:
    from sglang_dspark.draft.formats.checkpoint import describe

    reading = drafter.reading
    yield Finding("ok", "drafter", f"{reading.format} format: {describe(reading.config)}")
    for remark in reading.remarks:
        yield Finding("note" if remark.doubtful else "ok", "drafter", remark.sentence)
    if reading.unread_keys:
        unread = ", ".join(reading.unread_keys)
        remedy = "if one of them changes the network, fewer drafts are accepted; texts are right all the same"
        yield Finding("note", "drafter", f"these keys of config.json are not read: {unread}", remedy)


def _describe_memory(model: DraftModel) -> str:
    from sglang_dspark.draft.model import bytes_per_token

    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size_mib = sum(parameter.numel() * parameter.element_size() for parameter in parameters) / 2**20
    dtype = model.fc.weight.dtype
    per_token = bytes_per_token(model.config, dtype)
    return (
        f"{count:,} parameters ({size_mib:,.1f} MiB as {str(dtype).removeprefix('torch.')}), "
        f"draft K/V {per_token:,} bytes per token"
    )
