"""Installs what `python -m build` makes beside SGLang, in an environment that knows nothing of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from sglang_dspark import __version__

ROOT = Path(__file__).parents[2]
NOT_OF_THE_FOLDER = {"PYTHONSAFEPATH": "1"}
"""Environment of a Python that takes no module from the folder where it starts, which is the repository."""


def run(*command: str | Path) -> str:
    """Return what a command prints that has nothing of this repository on its path; it has to end well."""
    env = {**os.environ, **NOT_OF_THE_FOLDER, "PYTHONPATH": ""}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def python_with_the_wheel(folder: Path) -> Path:
    """Return the interpreter of an environment with the wheel, and behind it this one's packages but the editable."""
    built, environment = folder / "dist", folder / "environment"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, ROOT)
    assert (built / f"sglang_dspark-{__version__}.tar.gz").exists()
    venv.create(environment)
    python = environment / "bin" / "python"
    wheel = built / f"sglang_dspark-{__version__}-py3-none-any.whl"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    [packages] = environment.glob("lib/python3*/site-packages")
    # As a path and not as a site, whose files would bring the editable one along.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    run(environment / "bin" / "sglang-dspark", "enable-cpu")
    return python
