"""Files that a command writes at its end."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from sglang_dspark.errors import ConfigError


def check_outputs(output: Path | None, plot: Path | None) -> None:
    """What would fail at the end fails before a server has worked for minutes.

    Raises:
        ConfigError: a folder or matplotlib is missing.
    """
    check_folders({"--output": output, "--plot": plot})
    if plot is not None and find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {plot} needs matplotlib, which is not installed: pip install '.[bench]' in the repository"
        )


def check_folders(files: Mapping[str, Path | None]) -> None:
    """Refuse files in folders that do not exist.

    Args:
        files: by option; None where it was not given.

    Raises:
        ConfigError: a folder is missing.
    """
    for option, path in files.items():
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
