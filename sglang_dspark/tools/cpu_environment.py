"""Switch an environment for servers on a CPU on and off; :mod:`sglang_dspark.on_cpu` says what that does."""

import sysconfig
from pathlib import Path

from sglang_dspark import on_cpu
from sglang_dspark.errors import EngineError

# By its path, so that no package is imported before the program chooses its own, and so that nothing is said in an
# environment that the package has left.
_LINE = (
    f"import os, importlib.util as u; f = {on_cpu.__file__!r}; "
    "s = u.spec_from_file_location('_sglang_dspark_on_cpu', f) if os.path.exists(f) else None; "
    "m = s and u.module_from_spec(s); m and (s.loader.exec_module(m), m.watch_imports())\n"
)


def path_file() -> Path:
    """Return the file that Python reads when it starts in this environment."""
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
    return EngineError(
        f"{path_file()} cannot be written ({error.strerror}); install SGLang and sglang-dspark into an environment of "
        "your own, made with python -m venv"
    )
