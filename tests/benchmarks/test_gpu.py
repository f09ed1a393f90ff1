"""The order of what needs a GPU: every command can be parsed, and none stops the others."""

import importlib.util
import json
import sys
import time
from functools import cache

import gpu
import pytest
from click.testing import CliRunner
from gpu import CONTEXTS, PARTS, ROOT, STOPPED, Part, Setting
from serving.configurations import parse_configurations


def setting(output, *, builtin=False):
    pair = ("--target", str(ROOT), "--draft", str(ROOT), "--prompts", str(ROOT / "README.md"))
    return Setting(pair, output, builtin)


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
    for context in CONTEXTS:
        (tmp_path / f"context_{context}").mkdir()
    for builtin in (False, True):
        commands = PARTS[name].commands(setting(tmp_path, builtin=builtin))
        assert commands
        for python, script, *words in commands:
            assert python == sys.executable
            if script == "-m":
                assert words[0] in ("pytest", "sglang.benchmark.one_batch_server")
                assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
                continue
            options = parse(click_command(ROOT / script), words)
            assert options.get("device", "cuda") == "cuda"
            configurations = parse_configurations(options.get("configs", ["plain"]), "bfloat16")
            assert any(c.policy == "builtin" for c in configurations) <= builtin


def test_sglangs_own_keeps_as_many_drafts_as_ours(tmp_path):
    commands = PARTS["shape"].commands(setting(tmp_path, builtin=True))
    assert len(commands) == 1 + 4 + 2
    (given,) = {word for command in commands for word in command if word.startswith("builtin")}
    assert given == "builtin SGLANG_SIMULATE_ACC_LEN=4.63"
    ours = next(word for word in commands[1] if word.startswith("static7="))
    kept, length = 1.0, 1.0
    for probability in map(float, ours.split()[-1].split(",")):
        kept *= probability
        length += kept
    assert length == pytest.approx(4.63, abs=0.005)


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
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    texts = {"fails": ("print('why'); raise SystemExit(3)", 1), "hangs": (deaf, 0.02), "works": ("print('done')", 1)}
    began = time.monotonic()
    result, parts = run(**texts)
    assert time.monotonic() - began < 30
    assert result.exit_code == 1
    assert [part["status"] for part in parts.values()] == ["exit status 3", STOPPED, "ok"]
    assert (tmp_path / "fails.log").read_text() == "why\n"


def test_what_has_ended_well_is_not_run_again(run, tmp_path):
    count = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    for _ in range(2):
        result, _ = run(once=(count, 1), fails=(f"{count}; raise SystemExit(1)", 1))
        assert result.exit_code == 1
    assert (tmp_path / "count").read_text() == "xxx"
