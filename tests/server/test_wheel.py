"""What `python -m build` makes, installed beside SGLang in an environment that knows nothing of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from golden_server import CASES, DSPARK, TARGET, greedy
from server_pool import ON_GPU

from sglang_dspark import __version__
from sglang_dspark.tools.launch import CPU_FLAGS, CUDA_FLAGS, LaunchedServer

ROOT = Path(__file__).parents[2]
DRAFTER = "sglang_dspark/drafters/smollm2-135m-instruct/model.safetensors"


def run(*command: str | Path, **env: str) -> str:
    done = subprocess.run(
        command, check=False, env={**os.environ, "PYTHONPATH": "", **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """With the wheel, and behind it all packages of this environment but the editable one."""
    folder, built = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, ROOT)
    assert (built / f"sglang_dspark-{__version__}.tar.gz").exists()
    venv.create(folder)
    python = folder / "bin" / "python"
    wheel = built / f"sglang_dspark-{__version__}-py3-none-any.whl"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    [packages] = folder.glob("lib/python3*/site-packages")
    # As a path and not as a site, whose files would bring the editable one along.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder


def test_an_answer_from_the_wheel(environment, tmp_path):
    python, command = environment / "bin" / "python", environment / "bin" / "sglang-dspark"
    assert run(command, "--version").split()[-1] == __version__
    run(command, "enable-cpu")
    [packages] = environment.glob("lib/python3*/site-packages")
    assert (packages / DRAFTER).read_bytes() == (ROOT / DRAFTER).read_bytes()
    modules = run(python, "-c", "import sglang_dspark, dspark_kernels as k; print(sglang_dspark.__file__, k.__file__)")
    assert all(packages in Path(file).parents for file in modules.split())
    assert (packages / "sglang_dspark" / "py.typed").exists() and (packages / "dspark_kernels" / "py.typed").exists()
    flags = (*(CUDA_FLAGS if ON_GPU else CPU_FLAGS), "--dtype", "float32", *DSPARK)
    table = str(tmp_path / "step_times.json")
    env = {"PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "SGLANG_DSPARK_SPS_TABLE_PATH": table}
    with LaunchedServer(TARGET, *flags, env=env, python=str(python)) as server:
        case = CASES[0]
        answer = server.post_json("/generate", greedy(case["prompt_ids"], 8))
        assert server.get_json("/dspark/capabilities")["effective_decode_path"] == "dspark"
    assert answer["output_ids"] == case["output_ids"][:8]
