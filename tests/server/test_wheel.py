"""A server of the wheel: everything that serves is in it."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from golden_server import CASES, call, greedy
from wheel import NOT_OF_THE_FOLDER, ROOT, run

from sglang_dspark import __version__

DRAFTER = "sglang_dspark/drafters/smollm2-135m-instruct/model.safetensors"


@pytest.fixture
def python(guarded):
    """Return the interpreter of the server."""
    server = psutil.Process(guarded.pid)
    assert server.environ().items() >= NOT_OF_THE_FOLDER.items()
    return Path(server.cmdline()[0])


@pytest.fixture
def packages(python):
    """Return the folder in which the wheel is installed."""
    [folder] = python.parents[1].glob("lib/python3*/site-packages")
    return folder


def test_an_answer_from_the_wheel(guarded, python, packages):
    modules = run(python, "-c", "import sglang_dspark, dspark_kernels as k; print(sglang_dspark.__file__, k.__file__)")
    assert all(packages in Path(file).parents for file in modules.split())
    status, answer = call(guarded, "/generate", "user-key", greedy(CASES[0]["prompt_ids"], 8))
    assert (status, json.loads(answer)["output_ids"]) == (200, CASES[0]["output_ids"][:8])
    found = json.loads(call(guarded, "/dspark/capabilities", "user-key")[1])
    assert (found["effective_decode_path"], found["versions"]["sglang_dspark"]) == ("dspark", __version__)


def test_what_else_the_wheel_brings(python, packages):
    assert run(python.with_name("sglang-dspark"), "--version").split()[-1] == __version__
    assert (packages / DRAFTER).read_bytes() == (ROOT / DRAFTER).read_bytes()
    assert all((packages / name / "py.typed").exists() for name in ("sglang_dspark", "dspark_kernels"))
