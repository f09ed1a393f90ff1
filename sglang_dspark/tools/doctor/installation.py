"""Checks versions, entry point and device."""

import platform
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version

from sglang_dspark import __version__, on_cpu
from sglang_dspark.config import flag_name
from sglang_dspark.engine import support
from sglang_dspark.errors import EngineError
from sglang_dspark.tools import cpu_environment
from sglang_dspark.tools.doctor import Finding, one_line

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
        yield Finding("ok", "sglang", sglang_version)
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
        yield Finding(
            "fail", "entry point", f"{PLUGIN_GROUP} does not list {PLUGIN_VALUE}", "pip install . in the repository"
        )
        return
    yield Finding("ok", "entry point", f"{PLUGIN_GROUP}: {found[0].name} = {found[0].value}")
    try:
        with warnings.catch_warnings(action="ignore"):  # SGLang warns on import of what this machine does not have
            registration = _register(found[0])
    except Exception as error:  # noqa: BLE001 - whatever a foreign SGLang raises on import is the finding
        registration = Finding("fail", "registration", one_line(error), "install the sglang release named above")
    yield registration


def _register(entry_point: EntryPoint) -> Finding:
    # Called directly first, because SGLang would only log what it raises.
    entry_point.load()()
    from sglang_dspark.engine import start

    allowed = start.plugin_filter()
    if allowed is not None and entry_point.name not in [name.strip() for name in allowed.split(",")]:
        remedy = f"add {entry_point.name} to it or unset it"
        return Finding("fail", "registration", f"SGLANG_PLUGINS={allowed} keeps the plugin out", remedy)
    known = f"{support.COMMON_NAME} and its flags are known to SGLang in this process"
    return Finding("ok", "registration", known, f"{flag_name('engine')} builtin asks for SGLang's own worker")


def check_hooks() -> Iterator[Finding]:
    """Check the functions of SGLang that are patched. Imports the whole engine, which takes a while."""
    with warnings.catch_warnings(action="ignore"):
        from sglang_dspark.engine import start

        for hook, problem in start.known_hooks():
            subject = f"hook {hook.name}"
            if problem is None:
                yield Finding("ok", subject, f"{hook.where}, {hook.kind.value} {hook.target}: {hook.reason}")
            else:
                yield Finding("fail", subject, problem, support.INSTALL_SGLANG)


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
        if cpu_environment.is_enabled():
            yield Finding("ok", "enable-cpu", "without effect here: SGLang's own kernels serve the GPU")
        return
    yield _check_cpu(f"CPU with {torch.get_num_threads()} threads; no CUDA GPU is visible")


def _check_cpu(known: str) -> Finding:
    if not on_cpu.stands_in():
        found = f"{known}; {on_cpu.KERNELS} is the installed one"
        return Finding(
            "note", "device", found, "serve with SGLANG_USE_CPU_ENGINE=1 in the environment and --device cpu"
        )
    if not cpu_environment.is_enabled():
        found = f"{known}, and SGLang's kernel package is built for GPUs alone"
        return Finding("fail", "device", found, "run: sglang-dspark enable-cpu")
    return Finding("note", "device", f"{known}; a module of sglang-dspark stands in for SGLang's kernel package")
