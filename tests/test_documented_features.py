"""Every row of the documents that offers a feature names a test that uses it on a real server over HTTP."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
