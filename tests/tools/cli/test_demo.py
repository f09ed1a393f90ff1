"""`demo` against a stand-in for the server: what it asks, prints and concludes. The real servers run in `make demo`."""

import shutil
from pathlib import Path

import pytest

from sglang_dspark.tools.cli import serve as command


@pytest.fixture
def demo(run, stub_sglang, target, draft, tmp_path):
    """``demo(*options)`` runs the command on the golden pair's folders."""
    return lambda *options: run("demo", "--target", target, "--draft", draft, "--cache-dir", tmp_path / "c", *options)


def rows(output):
    """The words of every line that looks like one of a table."""
    return [words for line in output.splitlines() if len(words := line.split()) > 1]


def test_three_ways_to_decode_are_compared(demo, tmp_path):
    result = demo("--prompt", "same", "--prompt", "these differ", "--rounds", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("\none two three four\n") == 1
    assert result.output.count("\none two three 4\n") == 1
    table = rows(result.output)
    assert [row for row in table if row[:2] == ["plain", "SGLang"] and "times" not in row]
    off = next(row for row in table if row[:2] == ["plugin,", "off"])
    auto = next(row for row in table if row[:2] == ["plugin,", "auto"])
    assert " ".join(off[6:9]) == "off / plain"
    assert " ".join(auto[6:9]) == "auto / off"
    assert "off / plain is the plugin's own CPU attention, without a drafter" in result.output
    assert "auto / off is speculation: 1.50 tokens per step." in result.output
    assert "auto / plain" not in result.output
    assert "Medians of 4 answers each (prompts: 2, rounds: 2)" in result.output
    assert [(row[0], row[-2], row[-1]) for row in table if row[-1] in ("yes", "no")] == [
        ("same", "1.50", "yes"),
        ("these", "1.50", "no"),
    ]
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
