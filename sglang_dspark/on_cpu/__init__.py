"""Let SGLang start on a machine without a GPU, for which its kernel package has no build.

``sglang-dspark enable-cpu`` makes every Python process of an environment call :func:`watch_imports` when it starts, so
this module stays light. It looks for a GPU when SGLang is imported. With an NVIDIA driver nothing changes. Without one
SGLang serves on the CPU, its import of ``sgl_kernel`` finds the package of that name beside this module, and what
:data:`REPLACED` lists is taken from that package.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

KERNELS = "sgl_kernel"
STAND_IN = os.path.join(os.path.dirname(__file__), KERNELS, "__init__.py")  # noqa: PTH118, PTH120 - pathlib takes milliseconds

VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""Tells SGLang to serve on the CPU; a value that the user has set stays."""

WAITING = "OMP_WAIT_POLICY"
"""How the threads of one operation wait for each other. If they spin, as OpenMP has it, a step beside a busy program
takes four to ten times as long: each thread waits for one whose core the program has."""

REPLACED = {
    "sglang.kernels.ops.attention.fla.layernorm_gated": "gates.layernorm_fn",
    "sglang.kernels.ops.attention.fla.fused_norm_gate": "gates.rms_norm_gated",
    "sglang.kernels.ops.elementwise.elementwise": "gates.fused_gate_sigmoid_mul_add",
    "sglang.srt.models.qwen3_next": "without_cuda.torch",
}
"""Modules of SGLang that need a GPU on a CPU, too: for a name in each, what stands there instead, in the stand-in."""


class Finder:
    """Find nothing but the stand-in, and modules of SGLang that take something from it, in ``sys.meta_path``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the stand-in, and prepare the import of SGLang itself."""
        if name == "sglang" and not has_driver():
            os.environ.setdefault(VARIABLE, "1")
            if stands_in():
                os.environ.setdefault(WAITING, "PASSIVE")
        if name == KERNELS and stands_in():
            from importlib.util import spec_from_file_location

            return spec_from_file_location(KERNELS, STAND_IN)
        return _replacing(name, path) if name in REPLACED and stands_in() else None


def watch_imports() -> None:
    """Watch the imports of SGLang and of its kernels from now on."""
    sys.meta_path.insert(0, Finder())


def _replacing(name: str, path: Any) -> ModuleSpec | None:
    """Find a module of SGLang as Python does; once it is loaded, one of its names is the stand-in's."""
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.loader is None:
        return None
    load, (file, _, replaced) = spec.loader.exec_module, REPLACED[name].partition(".")

    def exec_module(module: Any) -> None:
        load(module)
        setattr(module, replaced, getattr(import_module(f"{KERNELS}.{file}"), replaced))

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


@cache
def has_driver() -> bool:
    """Return whether the driver of NVIDIA's GPUs can be loaded; without it SGLang's kernel package cannot."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def stands_in() -> bool:
    """Return whether the stand-in takes the place of ``sgl_kernel`` in a process that watches its imports."""
    return os.environ.get(VARIABLE, "1") == "1" and not has_driver() and not _is_built_for_cpus()


def _is_built_for_cpus() -> bool:
    """Return whether the installed kernel package was compiled for a CPU, from SGLang's sources.

    It then has its operators beside its modules; the one for CUDA has them in a folder for each kind of GPU.
    """
    spec = PathFinder.find_spec(KERNELS)
    folders = (spec and spec.submodule_search_locations) or ()
    return any(file.startswith("common_ops.") for folder in folders for file in os.listdir(folder))  # noqa: PTH208
