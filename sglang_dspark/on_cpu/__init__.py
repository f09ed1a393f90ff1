"""Let SGLang start on a machine without a GPU, for which its kernel package has no build.

``sglang-dspark enable-cpu`` makes every Python process of an environment call :func:`watch_imports` when it starts, so
this module stays light. It looks for a GPU when SGLang is imported. With an NVIDIA driver nothing changes. Without one
SGLang serves on the CPU, its import of ``sgl_kernel`` finds the package of that name next to this module, and
what :data:`REPLACED` lists is taken from that package.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_dspark.errors import EngineError

KERNELS = "sgl_kernel"
STAND_IN = os.path.join(os.path.dirname(__file__), KERNELS, "__init__.py")  # noqa: PTH118, PTH120 - pathlib takes milliseconds

VARIABLE = "SGLANG_USE_CPU_ENGINE"
"""Tells SGLang to serve on the CPU; a value that the user has set stays."""

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
"""How the threads of one operation wait for each other: they spin for some tens of microseconds, then they sleep.

OpenMP's default spins for milliseconds: next to a busy program a step takes four to ten times as long, because each
thread waits for one whose core the program has. If threads sleep at once, waking them slows down each operation.
"""

REPLACED = {
    "sglang.kernels.ops.attention.fla.layernorm_gated": ("layernorm_fn", "layernorm_fn"),
    "sglang.kernels.ops.attention.fla.fused_norm_gate": ("rms_norm_gated", "rms_norm_gated"),
    "sglang.kernels.ops.elementwise.elementwise": ("fused_gate_sigmoid_mul_add", "fused_gate_sigmoid_mul_add"),
    "sglang.srt.models.qwen3_next": ("torch", "torch_without_cuda"),
}
"""Modules of SGLang that need a GPU on a CPU, too: a name in each, and what of the stand-in takes its place."""


class Finder:
    """Find nothing but the stand-in, and modules of SGLang that take something from it, in ``sys.meta_path``."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find the stand-in, and prepare the import of SGLang itself."""
        if name == "sglang" and not has_driver():
            os.environ.setdefault(VARIABLE, "1")
            if stands_in():
                os.environ.update(WAITING if not WAITING.keys() & os.environ.keys() else {})
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
    load, (replaced, ours) = spec.loader.exec_module, REPLACED[name]

    def exec_module(module: Any) -> None:
        load(module)
        setattr(module, replaced, getattr(import_module(KERNELS), ours))

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

    It then has its operators next to its modules; the one for CUDA has them in a folder for each kind of GPU.
    """
    spec = PathFinder.find_spec(KERNELS)
    folders = (spec and spec.submodule_search_locations) or ()
    return any(file.startswith("common_ops.") for folder in folders for file in os.listdir(folder))  # noqa: PTH208


# By its path, so that no package is imported before the program chooses its own, and so that nothing is said in an
# environment that the package has left.
_LINE = (
    f"import os, importlib.util as u; f = {__file__!r}; "
    "s = u.spec_from_file_location('_sglang_dspark_on_cpu', f) if os.path.exists(f) else None; "
    "m = s and u.module_from_spec(s); m and (s.loader.exec_module(m), m.watch_imports())\n"
)


def path_file() -> Path:
    """Return the file that Python reads when it starts in this environment."""
    import sysconfig
    from pathlib import Path

    return Path(sysconfig.get_path("purelib")) / "sglang_dspark_on_cpu.pth"


def is_enabled() -> bool:
    """Return whether the Python processes of this environment watch their imports."""
    file = path_file()
    return file.exists() and file.read_text(encoding="utf-8") == _LINE


def enable() -> None:
    """Have processes watch their imports from their next start on; raise if the environment cannot be written to."""
    try:
        path_file().write_text(_LINE, encoding="utf-8")
    except OSError as error:
        raise _unwritable(error) from error


def disable() -> None:
    """Undo :func:`enable`."""
    try:
        path_file().unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(error) from error


def _unwritable(error: OSError) -> EngineError:
    from sglang_dspark.errors import EngineError

    return EngineError(
        f"{path_file()} cannot be written ({error.strerror}); install SGLang and sglang-dspark into an environment of "
        "your own, made with python -m venv"
    )
