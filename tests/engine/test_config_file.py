"""Every option in a YAML file for SGLang's ``--config``, as it arrives behind SGLang's parser."""

from dataclasses import fields
from pathlib import Path

import pytest
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.engine import decision
from sglang_dspark.errors import ConfigError

TARGET = Path(__file__).parents[1] / "data" / "golden" / "target"

WRITTEN = {
    "schedule": {"off": "off", "'off'": "off", "early-stop": "early-stop"},
    "block_size": {"5": 5},
    "verify_len": {"0": 0, "3": 3},
    "confidence_threshold": {"0.5": 0.5, ".5": 0.5, "1": 1.0},
    "confidence_sts_path": {"of/mine.json": "of/mine.json"},
    "online_calibration": {"off": False, "on": True, "no": False, "True": True, "'off'": False},
    "sps_table_path": {"my table.json": "my table.json"},
    "draft_vocabulary": {"of/mine.json": "of/mine.json"},
    "draft_quantization": {"int8": "int8"},
    "draft_free": {"true": True, "on": True, "false": False, "'on'": True},
    "answer_cache": {"64": 64},
    "tpot_ms": {"30": 30.0},
    "min_tpot_ms": {"30": 30.0, "inf": float("inf")},
    "max_gap_ms": {"50": 50.0},
    "prompt_rows": {"64": 64},
    "unproven": {"survivals": ("survivals",), "[held-rows, prompt-rows]": ("held-rows", "prompt-rows")},
    "answer_cache_key": {"prompt": "prompt"},
    "engine": {"plugin": "plugin"},
    "untested_sglang": {"yes": True, "off": False},
    "fallback": {"target-only": "target-only"},
    "simulate_acceptance": {"0.8": (0.8,), "0.8,0.5": (0.8, 0.5), "[0.8, 0.5]": (0.8, 0.5), "[1, 0]": (1.0, 0.0)},
}
"""By option: what a file has, and the option's value."""
WITH = {
    "verify_len": {"schedule": "static"},
    "confidence_threshold": {"schedule": "threshold"},
    "answer_cache_key": {"answer_cache": "64"},
}
"""By option: what else it needs."""


def read(folder, name, text):
    """Return the options of a server whose file has this text for this option."""
    lines = [f"{flag_name(other)[2:]}: {value}" for other, value in {**WITH.get(name, {}), name: text}.items()]
    (folder / "server.yaml").write_text("\n".join(lines))
    load_plugins()
    args = prepare_server_args(["--model-path", str(TARGET), "--config", str(folder / "server.yaml")])
    return DSparkConfig.resolve(decision.given_texts(args), env={})


def test_every_option_is_here():
    assert list(WRITTEN) == [option.name for option in fields(DSparkConfig)]


@pytest.mark.parametrize(
    ("name", "text", "value"), [(name, *case) for name, cases in WRITTEN.items() for case in cases.items()]
)
def test_an_option_in_a_file(tmp_path, name, text, value):
    assert getattr(read(tmp_path, name, text), name) == value


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("schedule", "on", "schedule='true': must be one of auto"),
        ("online_calibration", "1", "online-calibration='1': must be on or off"),
        ("answer_cache", "off", "answer-cache='false': must be an integer"),
        ("max_gap_ms", "0.5", "max-gap-ms='0.5': must lie in 1 to 60000"),
        ("max_gap_ms", ".nan", "max-gap-ms='nan': must lie in"),
        ("simulate_acceptance", "[0.5, 2]", "simulate-acceptance='0.5,2': must all lie in"),
        ("simulate_acceptance", "[0.5, often]", "simulate-acceptance='0.5,often': must all lie in"),
    ],
)
def test_a_wrong_value_in_a_file(tmp_path, name, text, named):
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, name, text)
