"""Tests that the documents say what the code does: options, keys, folders, commands and links.

Every feature that they offer has a test that uses it on a real server.
"""

import ast
import re
import tomllib
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from sglang_dspark.config import DSparkConfig, default_text, flag_name
from sglang_dspark.draft.families import FAMILIES, UNSERVED
from sglang_dspark.engine.requests import known_keys
from sglang_dspark.tools.cli import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
SERVED = (ROOT / "docs" / "compatibility.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
MAP = (ROOT / "docs" / "architecture.md").read_text()
README_LINES, README_WORDS = 120, 900


def flag_rows() -> list[str]:
    """The rows that the options table has to have."""
    rows = []
    for option in fields(DSparkConfig):
        text, default = option.metadata["help"], default_text(option.name)
        rows.append(f"| `{flag_name(option.name)}` | {default} | {text} |")
    return rows


def table_keys(first_heading: str) -> list[str]:
    """First cells, without backticks, of the table whose header starts with this cell."""
    table = OPTIONS.split(f"| {first_heading} |", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


def test_options_table_equals_the_configuration():
    expected = flag_rows()
    found = [line for line in OPTIONS.splitlines() if line.startswith("| `--speculative-dspark-")]
    assert found == expected, "write these rows into docs/options.md:\n" + "\n".join(expected)


def test_speculation_table_equals_the_request_field():
    assert table_keys("key") == [*known_keys()]


def test_the_table_of_targets_has_the_families():
    table = SERVED.split("| target |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    assert [row.split("|")[2].strip(" `") for row in table] == [each.architecture for each in FAMILIES]


def test_the_table_of_unserved_targets_equals_the_list():
    table = SERVED.split("| targets that the plugin refuses |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    expected = [
        f"| {', '.join(f'`{name}`' for name, why in UNSERVED.items() if why == reason)} | {reason} |"
        for reason in dict.fromkeys(UNSERVED.values())
    ]
    assert table == expected, "write these rows into docs/compatibility.md:\n" + "\n".join(expected)


def test_every_test_that_waits_for_a_gpu_is_named():
    named = re.findall(r"^\|.*`(tests/gpu/\w+\.py)` \|$", BENCHMARKS, re.MULTILINE)
    assert set(named) == {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}


def test_every_folder_of_the_package_is_on_the_map():
    tree = MAP.split("## The map", 1)[1].split("## ", 1)[0]
    folders = {path.parent.name for path in (ROOT / "sglang_dspark").glob("*/__init__.py")}
    assert {folder for folder in folders if f" {folder}/ " not in tree} == set()


def test_the_readme_is_read_in_five_minutes():
    assert len(README.splitlines()) <= README_LINES
    assert len(README.split()) <= README_WORDS


PATHS = re.findall(r"`((?:engine|features|worker|step|scheduling|draft|tools)/[\w/.]*)`", MAP)


@pytest.mark.parametrize("path", sorted(set(PATHS)))
def test_files_that_the_map_names_exist(path):
    assert (ROOT / "sglang_dspark" / path).exists()


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
COMMAND = re.compile(r"^(?:make|python -m sglang_dspark) ([a-z0-9-]+)", re.MULTILINE)


@pytest.mark.parametrize("command", sorted(set(COMMAND.findall(README) + COMMAND.findall(CONTRIBUTING))))
def test_commands_exist(command):
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert command in targets or command in COMMANDS


DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/README.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_local_links_lead_somewhere(document):
    """Links go to files that exist, and to headings that a page has."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()) if "://" not in link]
    assert links or document != ROOT / "README.md"
    for link in links:
        name, _, heading = link.partition("#")
        page = document.parent / name if name else document
        assert page.exists(), link
        if heading and page.suffix == ".md":
            titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, link


SERVER_TESTS = ROOT / "tests" / "server"
FEATURES = tomllib.loads((ROOT / "tests" / "data" / "documented_features.toml").read_text())
# By document, the first cells of its tables' headings.
TABLES = {
    "docs/compatibility.md": ("feature", "form"),
    "docs/options.md": ("flag", "key", "route"),
    "docs/operating.md": ("route", "policy"),
}
NOT_OFFERED = ("HTTP 400", "never")


def features_of(document: str) -> list[str]:
    """The things that the rows of a document's tables offer: the parts of their first cells."""
    found = []
    for heading in TABLES[document]:
        table = (ROOT / document).read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
        for row in table.splitlines()[2:]:
            name, answer, *_ = (cell.strip() for cell in row.strip("|").split(" |"))
            if not answer.startswith(NOT_OFFERED):
                found += re.split(r", (?![^(]*\))", name)
    return found


@cache
def functions_of(module: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((SERVER_TESTS / module).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", TABLES)
def test_every_feature_names_tests(document):
    assert sorted(FEATURES[document]) == sorted(features_of(document))
    assert [feature for feature, tests in FEATURES[document].items() if not tests] == []


NAMED = sorted({test for document in FEATURES.values() for tests in document.values() for test in tests})


@pytest.mark.parametrize("test", NAMED)
def test_the_test_is_there_and_runs(test):
    """With a server among its arguments, and with the case that is named; none is skipped."""
    module, _, name = test.partition("::")
    name, _, case = name.partition("[")
    source, function = (SERVER_TESTS / module).read_text(), functions_of(module)[name]
    assert function.args.args
    marks = [*map(ast.unparse, function.decorator_list), *re.findall("^pytestmark = .*", source, re.MULTILINE)]
    assert not re.search("skip|xfail", " ".join(marks))
    case = case.removesuffix("]")
    written = (f'"{case}"', f'"{case.rstrip("0123456789")}{{')  # as it is, or with numbers of a loop
    assert not case or any(text in source for text in written)
