"""The list of mutants keeps up with the code. `make evidence` tries them.

The list of when each thorough test has last passed has all of them, and none that is gone.
"""

import ast
import json
import re
from pathlib import Path

from mutants import read_mutants

ROOT = Path(__file__).parents[1]
MUTANTS = read_mutants()


def test_the_list_reaches_every_part():
    assert len(MUTANTS) >= 25
    parts = ("scheduling/", "step/", "worker/", "engine/", "draft/", "kernels/")
    assert [part for part in parts if not any(part in mutant.file for mutant in MUTANTS)] == []


def test_every_mutant_changes_one_place_and_names_a_test():
    texts = {name: (ROOT / name).read_text() for one in MUTANTS for name in (one.file, one.test.partition("::")[0])}
    for mutant in MUTANTS:
        assert texts[mutant.file].count(mutant.old) == 1, mutant.why
        assert mutant.new != mutant.old, mutant.why
        path, _, name = mutant.test.partition("::")
        assert re.search(rf"^def {name.partition('[')[0]}\(", texts[path], re.MULTILINE), mutant.why
        assert mutant.why.endswith("."), mutant.why


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
