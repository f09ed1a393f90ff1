"""`demo` against a stand-in for the server: what it asks, prints and concludes. The real servers run in `make demo`."""

import shutil
from pathlib import Path

import pytest

from sglang_dspark.tools.cli import demo as command
from sglang_dspark.tools.demo.compare import Answer, accept_length, first_difference, tokens_per_second


@pytest.fixture
def demo(run, stub_sglang, target, draft, tmp_path):
    """``demo(*options)`` runs the command on the golden pair's folders."""
    return lambda *options: run("demo", "--target", target, "--draft", draft, "--cache-dir", tmp_path / "c", *options)


def test_two_servers_are_compared(demo, tmp_path):
    result = demo("--prompt", "same", "--prompt", "these differ")
    assert result.exit_code == 0, result.output
    assert result.output.count("\none two three four\n") == 3
    assert result.output.count("\none two three 4\n") == 1
    assert "accept length 1.50" in result.output
    table = [words for line in result.output.splitlines() if (words := line.split())[-1:] in (["yes"], ["no"])]
    assert table[0][:3] == ["same", "4", "1.50"]
    assert [row[-1] for row in table] == ["yes", "no", "no"]
    assert "texts differ from character 14 for: these differ" in result.output
    assert (tmp_path / "c" / "demo-dspark.log").exists()
    assert (tmp_path / "c" / "demo-plain.log").exists()


def test_a_target_with_a_chat_template_is_talked_to(run, stub_sglang, target, draft, tmp_path):
    chat = Path(shutil.copytree(target, tmp_path / "chat", copy_function=shutil.copyfile))
    (chat / "chat_template.jinja").touch()
    result = run("demo", "--target", chat, "--draft", draft, "--cache-dir", tmp_path, "--prompt", "same")
    assert result.exit_code == 0, result.output
    assert result.output.count("one two three four") == 2


def test_a_server_that_does_not_start_ends_the_demo(run, stub_sglang, draft, tmp_path):
    (tmp_path / "die").mkdir()
    (tmp_path / "die" / "config.json").write_text("{}")
    result = run("demo", "--target", tmp_path / "die", "--draft", draft, "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "Error: the server ended with exit status 1" in result.output
    assert "no such model" in result.output


def test_a_request_that_is_refused_ends_the_demo(demo):
    result = demo("--prompt", "refuse this")
    assert result.exit_code == 1
    assert "Error: the server did not answer:" in result.output
    assert "no such luck" in result.output


def test_an_installation_without_the_bundled_drafter(run, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_BUNDLED_DRAFTER", tmp_path)
    result = run("demo", "--cache-dir", tmp_path)
    assert result.exit_code == 1
    assert "give a pair with --target and --draft" in result.output


def test_sums_over_answers():
    answers = [Answer("a", 30, 2.0, 10, 29), Answer("b", 10, 0.5, 10, 9)]
    assert tokens_per_second(answers) == 16.0
    assert accept_length(answers) == 1.9
    assert accept_length([Answer("a", 30, 2.0, 0, 0)]) is None


@pytest.mark.parametrize(
    ("left", "right", "index"), [("ab", "ab", None), ("ab", "ac", 1), ("ab", "abc", 2), ("", "", None)]
)
def test_first_difference(left, right, index):
    assert first_difference(left, right) == index
