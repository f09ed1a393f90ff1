"""Every kernel compiles to machine code for GPUs that are not here, and asks for no more than they have."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "dspark_kernels"


def kernels() -> set[str]:
    """Functions that Triton compiles and that are launched; others are helpers of theirs."""
    sources = "".join(path.read_text() for path in KERNELS.rglob("*.py"))
    return {name for name in re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE) if f"{name}[" in sources}


@pytest.mark.slow
@pytest.mark.parametrize("forms", [["--first-forms"], pytest.param([], marks=pytest.mark.thorough)], ids=["one", "all"])
def test_every_kernel_compiles_and_fits(forms, tmp_path):
    """Kernels compile for the least shared memory that SGLang serves with; `make evidence` tries the others."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels" / "compile_for.py")]
    options = ["--capability", "89", *forms, "--output", str(tmp_path / "compiled.json")]
    result = subprocess.run(
        command + options, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    compiled = json.loads((tmp_path / "compiled.json").read_text())["kernels"]
    assert {kernel["kernel"] for kernel in compiled} == kernels()
    assert len(kernels()) > 10
    assert all(0 < kernel["registers"] <= 255 for kernel in compiled)
