"""On a GPU nothing is on by default that no GPU has run: the table, the files that it names, and the defaults."""

import json
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.errors import ConfigError
from sglang_dspark.gpu_paths import GPU_PATHS, UnprovenPath, described, is_on

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
UNPROVEN = flag_name("unproven")


@pytest.mark.parametrize("name", [name for name, path in GPU_PATHS.items() if path.shown_by])
def test_what_is_shown_ran_on_a_gpu(name):
    shown = RESULTS / GPU_PATHS[name].shown_by
    assert shown.exists()
    record = shown if shown.suffix == ".json" else shown.with_name("provenance.json")
    assert json.loads(record.read_text())["hardware"]["gpu"]


def test_what_is_open_has_to_be_named():
    """By an option whose default leaves it out, or by one of SGLang's; or else nothing is left in its place."""
    default, options = DSparkConfig(), {flag_name(option.name) for option in fields(DSparkConfig)}
    assert default.unproven == ()
    for name, path in GPU_PATHS.items():
        flag = path.named_by.partition(" ")[0]
        assert not flag.startswith("--speculative-dspark-") or flag in options
        assert not path.option or not getattr(default, path.option)
        if not path.shown_by and not path.named_by:
            assert "the code that it replaced is gone" in path.what, name
    assert {name for name, found in described(()).items() if found["on"]} == {
        *("graphs", "fused-graphs", "fused-layers", "walk", "auto"),
        *("one-launch-attention", "inverted-draws", "shortlist-walk"),
    }


def test_the_option_names_the_paths_that_have_no_other():
    named = [name for name, path in GPU_PATHS.items() if path.named_by.startswith(UNPROVEN)]
    assert [*get_args(UnprovenPath)] == named
    assert all(GPU_PATHS[name].named_by == f"{UNPROVEN} {name}" and not GPU_PATHS[name].shown_by for name in named)


@pytest.mark.parametrize("path", get_args(UnprovenPath))
def test_a_gpu_takes_them_if_they_are_named(path):
    resolved = DSparkConfig.resolve({"unproven": f"held-rows,{path}"}, env={})
    by_variable = DSparkConfig.resolve({}, env={"SGLANG_DSPARK_UNPROVEN": path})
    assert is_on(path, resolved.unproven, on_gpu=True) and is_on(path, by_variable.unproven, on_gpu=True)
    assert not is_on(path, (), on_gpu=True) and is_on(path, (), on_gpu=False)


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match=f"{UNPROVEN}='graphs': must be some of prompt-rows, held-rows, survivals"):
        DSparkConfig.resolve({"unproven": "graphs"}, env={})


def test_what_is_on_is_said_with_the_reason():
    told = described(["int8"])
    assert told["int8"] == {
        "on": True,
        "why": "turned on by --speculative-dspark-draft-quantization int8; no GPU run shows that it is not slower",
    }
    assert told["held-rows"]["on"] is False and "off without" in told["held-rows"]["why"]
    assert told["walk"] == {"on": True, "why": "benchmarks/results/h200/kernels.json"}
