"""The order of what needs a GPU: every command can be parsed, and none stops the others."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache

import gpu
import pandas as pd
import pytest
from click.testing import CliRunner
from golden_server import DRAFT, RANDOM_LENGTHS, TARGET, sitecustomized
from gpu import MAKE_PROMPTS, PARTS, QUARTERS, ROOT, STOPPED, TRAINED, Part, Setting
from serving.configurations import parse_configurations
from tables import OPEN_PATHS, equal_draws, open_paths

from sglang_dspark.gpu_paths import GPU_PATHS
from sglang_dspark.tools.cli import main


def setting(output, *, rehearses=False):
    return Setting(str(TARGET), str(DRAFT), (str(ROOT / "README.md"),), output, rehearses)


@cache
def click_command(script):
    """The command of a script, without running it."""
    spec = importlib.util.spec_from_file_location(f"parsed_{script.stem}", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(script.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(script.parent))
    return module.main


def parse(command, words):
    """The options that ``words`` give."""
    return command.make_context("script", list(words)).params


@pytest.mark.parametrize("name", list(PARTS))
def test_every_command_can_be_parsed(name, tmp_path):
    (tmp_path / "traces").mkdir()
    for trained in TRAINED:
        (tmp_path / trained).mkdir()
        (tmp_path / trained / "draft").symlink_to(DRAFT)
    for rehearses in (False, True):
        commands = PARTS[name].commands(setting(tmp_path, rehearses=rehearses))
        assert commands
        for python, script, *words in commands:
            assert python == sys.executable
            if words[0] == "sglang_dspark":
                parse(main.get_command(None, words[1]), words[2:])
                continue
            if script == "-m":
                assert words[0] == "pytest"
                assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
                continue
            if script == MAKE_PROMPTS:
                assert (ROOT / script).exists()
                continue
            options = parse(click_command(ROOT / script), words)
            assert options.get("device", "cuda") == "cuda" or rehearses
            parse_configurations(options.get("configs", ["plain"]), "bfloat16")


@pytest.mark.parametrize("quarter", QUARTERS)
def test_a_quarter_of_an_hour_is_enough(quarter):
    assert sum(PARTS[name].minutes for name in quarter) <= 14
    documented = (ROOT / "Makefile").read_text() + (ROOT / "benchmarks" / "README.md").read_text()
    assert re.search(rf"QUARTER *= *{','.join(quarter)}\b", documented)


def test_quarters_measure_what_no_gpu_has_run(tmp_path):
    """Every path that has two settings, with it and without."""
    open_ones = {name for name, path in GPU_PATHS.items() if not path.shown_by}
    # No pair of the shape has a DFlash 2 drafter; drawing by inversion is measured by the kernels' own benchmark.
    # The part `bits` compares servers with the same bits. The self-check is no path of a step: tests/gpu runs it.
    assert open_ones - set(OPEN_PATHS) == {"inverted-draws", "shortlist-walk", "same-bits", "self-check"}
    assert open_ones >= set(OPEN_PATHS)
    for path, (part, _, one, other) in OPEN_PATHS.items():
        assert part in (*QUARTERS[0], *QUARTERS[1])
        commands = PARTS[part].commands(setting(tmp_path))
        (swept,) = [parse(click_command(ROOT / words[1]), words[2:]) for words in commands if "sweep_c" in words[1]]
        found = parse_configurations(swept["configs"], "bfloat16")
        told = {each.label: " ".join((*each.variables, *each.extra_flags)) for each in found}
        assert one in told and other in told
        turned_on = GPU_PATHS[path].named_by.rpartition(" ")[2]
        assert not turned_on or (turned_on in told[one] and turned_on not in told[other])


def test_the_report_says_which_defaults_would_change(tmp_path):
    """Those of paths with which no load is slower."""
    (tmp_path / "paths").mkdir()
    speeds = {"off": (100, 200), "held": (101, 200), "static7": (100, 100), "survivals": (103, 99)}
    rows = [
        {
            "config": config,
            "policy": "off",
            "dtype": "bfloat16",
            "concurrency": users,
            "round": 0,
            "decode_tok_s": speed,
        }
        for config, by_users in speeds.items()
        for users, speed in zip((1, 16), by_users, strict=True)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "paths" / "sweep.csv", index=False)
    told = [row.split("|") for row in open_paths(tmp_path).splitlines() if row.startswith("| `")]
    defaults = {name.strip(" `"): default.strip() for _, name, *_, default, _ in told}
    assert defaults == dict.fromkeys(OPEN_PATHS, "") | {"held-rows": "on", "survivals": "stays"}


@pytest.mark.parametrize("name", ["chat", "long", "mathematics"])
def test_both_workers_draw_by_the_same_rates(name, tmp_path):
    commands = PARTS[name].commands(setting(tmp_path))
    (swept,) = [parse(click_command(ROOT / words[1]), words[2:]) for words in commands if "sweep_c" in words[1]]
    configurations = parse_configurations(swept["configs"], "bfloat16")
    rates = {c.label: c.simulated_steps for c in configurations}
    assert rates["static7"] == rates["builtin"] is not None and rates["auto"] is rates["plain@bfloat16"] is None
    assert swept["max_tokens"] == 512 and swept["together"]


@pytest.mark.slow
@pytest.mark.thorough
def test_quarters_of_an_hour_rehearsed(tmp_path):
    """Run from end to end on a CPU, with a tiny pair, where the tests' stand-ins let SGLang's own worker serve."""
    rehearsed = [name for quarter in QUARTERS for name in quarter if name != "streams"]
    target, prompts = tmp_path / "target", tmp_path / "prompts.jsonl"
    shutil.copytree(TARGET, target)
    (target / "chat_template.jinja").write_text("{% for m in messages %}the {{ m.content }} . {% endfor %}the")
    prompts.write_text("".join(json.dumps({"turns": [f"red {noun} sees"]}) + "\n" for noun in ("cat", "dog", "bird")))
    pair = ["--target", str(target), "--draft", str(DRAFT), "--prompts", str(prompts)]
    command = [sys.executable, "benchmarks/gpu.py", *pair, "--only", ",".join(rehearsed), "--rehearse"]
    stand_ins = {"SGLANGS_OWN_ON_A_CPU": "1", **sitecustomized(RANDOM_LENGTHS), "SGLANG_USE_CPU_ENGINE": "1"}
    told = {"cwd": ROOT, "env": os.environ | stand_ins, "capture_output": True, "text": True}
    ended = subprocess.run([*command, "--output", str(tmp_path)], check=False, **told)
    logs = "".join((tmp_path / f"{name}.log").read_text()[-3000:] for name in rehearsed)
    assert ended.returncode == 0, ended.stdout + ended.stderr + logs
    order = json.loads((tmp_path / "order.json").read_text())
    assert [(name, order[name]["status"]) for name in rehearsed] == [(name, "ok") for name in rehearsed]
    equal = {"static7", "auto", "builtin"}
    named = {"off", "static7", "held", "survivals", "int8"}
    measured = {"paths": named, "prompts": {"apart", "verified", "beside"}}
    frames = {name: pd.read_csv(tmp_path / name / "sweep.csv") for name in rehearsed if name != "training"}
    for part, configs in {"chat": equal, "long": equal, "mathematics": equal, **measured}.items():
        frame = frames[part]
        assert len(frame) == 3 * 2 * 2 and set(frame["config"]) == configs and frame["decode_tok_s"].notna().any()
        traces = {path.parent.name for path in (tmp_path / part / "traces").rglob("*.trace.json.gz")}
        assert traces == {f"{name}_{users}" for name in configs for users in (1, 2)}
    assert set(frames["engines"]["policy"]) == {"auto", "builtin"}
    beside = frames["prompts"].groupby("config")["prompts_beside"].sum()
    assert beside["beside"] > 0 == beside["apart"] == beside["verified"]
    for name in ("bundled", *TRAINED):
        results = json.loads((tmp_path / "training" / f"{name}.json").read_text())["results"]
        assert all(found["accept_length"] >= 1 for found in results)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "h200").symlink_to(tmp_path)
    rows = equal_draws(tmp_path / "results").splitlines()
    of = ("| chat", "100"), ("| mathematics", "100"), ("| mixed", "4000")
    assert [tuple(row.split(" | ")[:3]) for row in rows[2:8]] == [(*what, users) for what in of for users in "12"]
    told = [row.split(" | ") for row in (tmp_path / "open_paths.md").read_text().splitlines() if row.startswith("| `")]
    assert {name for name, *_, ratios, _ in told if ratios == "not measured"} == {"| `scheduled`", "| `memory-graphs`"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the tool with parts that are Python texts and their minutes; returns its result and ``order.json``."""

    def run(*words, **texts):
        parts = {
            name: Part("?", minutes, lambda setting, text=text: commands(text, setting))
            for name, (text, minutes) in texts.items()
        }
        monkeypatch.setattr(gpu, "PARTS", parts)
        pair = [*("--target", str(ROOT), "--draft", str(ROOT)), *("--prompts", str(ROOT / "README.md"))]
        result = CliRunner().invoke(gpu.main, [*pair, "--output", str(tmp_path), *words])
        order = tmp_path / "order.json"
        return result, json.loads(order.read_text()) if order.exists() else {}

    def commands(text, setting):
        return [[sys.executable, "-c", text, str(setting.output)]]

    return run


def test_a_part_that_fails_or_hangs_stops_no_other(run, tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    texts = {"fails": ("print('why'); raise SystemExit(3)", 1), "hangs": (deaf, 0.02), "works": ("print('done')", 1)}
    began = time.monotonic()
    result, parts = run(**texts)
    assert time.monotonic() - began < 300
    assert result.exit_code == 1
    assert [part["status"] for part in parts.values()] == ["exit status 3", STOPPED, "ok"]
    assert (tmp_path / "fails.log").read_text() == "why\n"


def test_what_has_ended_well_is_not_run_again(run, tmp_path):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    for _ in range(2):
        result, _ = run(once=(count, 1), fails=(f"{count}; raise SystemExit(1)", 1))
        assert result.exit_code == 1
    assert (tmp_path / "count").read_text() == "xxx"
