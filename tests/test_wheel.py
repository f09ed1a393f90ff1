"""The wheel serves with SGLang in an environment that knows nothing of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from sglang_dspark import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DRAFTER = "sglang_dspark/drafters/smollm2-135m-instruct/model.safetensors"
REGISTERED = """
from importlib.metadata import entry_points
import dspark_kernels, dspark_training, sglang_dspark
[plugin] = entry_points(group="sglang.srt.plugins", name="dspark")
plugin.load()
print(*(module.__file__ for module in (sglang_dspark, dspark_kernels, dspark_training)))
"""


def run(*command: str | Path) -> str:
    """Return what a command prints that has nothing of this repository on its path; it has to end well."""
    env = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_everything_that_serves_is_in_the_wheel(tmp_path):
    built, environment = tmp_path / "dist", tmp_path / "environment"
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, ROOT)
    assert (built / f"sglang_dspark-{__version__}.tar.gz").exists()
    venv.create(environment)
    python, [packages] = environment / "bin" / "python", environment.glob("lib/python3*/site-packages")
    wheel = built / f"sglang_dspark-{__version__}-py3-none-any.whl"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", "--no-deps", "--no-index", wheel)
    # As a path and not as a site, whose files would bring the editable one along.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    run(python.with_name("sglang-dspark"), "enable-cpu")
    assert run(python.with_name("sglang-dspark"), "--version").split()[-1] == __version__
    assert all(packages in Path(file).parents for file in run(python, "-c", REGISTERED).split())
    assert (packages / DRAFTER).read_bytes() == (ROOT / DRAFTER).read_bytes()
    assert all((packages / name / "py.typed").exists() for name in ("sglang_dspark", "dspark_kernels"))
    assert {file.relative_to(packages) for file in packages.glob("sglang_dspark/**/*.py")} == {
        file.relative_to(ROOT) for file in ROOT.glob("sglang_dspark/**/*.py")
    }
