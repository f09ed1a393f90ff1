"""Let SGLang start on a machine without a GPU, for which its kernel package has no build.

``sglang-dspark enable-cpu`` makes every Python process of an environment call :func:`watch_imports` when it starts, so
this module stays light. It looks for a GPU when SGLang is imported. With an NVIDIA driver nothing changes. Without one
SGLang serves on the CPU, and its import of ``sgl_kernel`` finds the module of that name beside
this one.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

KERNELS = "sgl_kernel"
STAND_IN = os.path.join(os.path.dirname(__file__), f"{KERNELS}.py")  # noqa: PTH118, PTH120 - pathlib takes milliseconds

VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""Tells SGLang to serve on the CPU; a value that the user has set stays."""


class Finder:
    """Find nothing but the stand-in, as an entry of ``sys.meta_path``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the stand-in, and prepare the import of SGLang itself."""
        if name == "sglang" and not has_driver():
            os.environ.setdefault(VARIABLE, "1")
        if name == KERNELS and stands_in():
            from importlib.util import spec_from_file_location

            return spec_from_file_location(KERNELS, STAND_IN)
        return None


def watch_imports() -> None:
    """Watch the imports of SGLang and of its kernels from now on."""
    sys.meta_path.insert(0, Finder())


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
