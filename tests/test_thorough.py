"""The list of when each thorough test has last passed has all of them, and none that is gone."""

import ast
import json
from pathlib import Path

TESTS = Path(__file__).parent
PASSED = TESTS.parent / "benchmarks" / "results" / "thorough.json"


def functions(*, thorough):
    """The test functions, ``file::function``; those of which a form is marked ``thorough`` where they are decorated."""
    found = set()
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        marks = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Assign)]
        whole = any(mark.startswith("pytestmark = ") and "mark.thorough" in mark for mark in marks)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marked = whole or any("mark.thorough" in ast.unparse(mark) for mark in node.decorator_list)
                if marked or not thorough:
                    found.add(f"tests/{path.relative_to(TESTS)}::{node.name}")
    return found


def test_the_list_has_all_thorough_tests():
    listed = {name.partition("[")[0] for name in json.loads(PASSED.read_text())}
    assert functions(thorough=True) - listed == set()
    assert listed - functions(thorough=False) == set()
