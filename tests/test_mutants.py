"""The list of mutants keeps up with the code. `make evidence` tries them.

The list of when each thorough test has last passed has all of them, and none that is gone.
"""

import ast
import json
from pathlib import Path

from mutants import Mutant, read_entries

ROOT = Path(__file__).parents[1]
PARTS = {"scheduling", "step", "worker", "engine", "draft", "features", "dspark_kernels"}


def test_every_mutant_changes_one_place_and_names_a_test():
    mutants, problems = [], []
    for entry in read_entries():
        try:
            mutant = Mutant.of(entry)
            mutant.change((ROOT / mutant.place.file).read_text())
        except ValueError as error:
            problems.append(str(error))
        else:
            mutants.append(mutant)
    assert not problems, "\n".join(problems)
    for mutant in mutants:
        assert mutant.new != mutant.old, mutant.why
        assert "::test_" in mutant.test, mutant.why
        assert mutant.why.endswith("."), mutant.why
    assert PARTS - {part for mutant in mutants for part in Path(mutant.place.file).parts} == set()


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
