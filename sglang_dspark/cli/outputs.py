"""Files that a command writes at its end."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sglang_dspark.errors import ConfigError


def check_outputs(output: Path | None, plot: Path | None) -> None:
    """What would fail at the end fails before a server has worked for minutes.

    Raises:
        ConfigError: a folder or matplotlib is missing.
    """
    for option, path in (("--output", output), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {plot} needs matplotlib, which is not installed: pip install 'sglang-dspark[bench]'")
