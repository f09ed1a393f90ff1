"""The list of mutants keeps up with the code. `make evidence` tries them."""

import ast
from pathlib import Path

import pytest
from mutants import read_mutants

ROOT = Path(__file__).parents[1]
MUTANTS = read_mutants()


def test_the_list_reaches_every_part():
    assert len(MUTANTS) >= 25
    parts = ("scheduling/", "step/", "worker/", "engine/", "draft/", "kernels/")
    assert [part for part in parts if not any(part in mutant.file for mutant in MUTANTS)] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.why)
def test_every_mutant_changes_one_place_and_names_a_test(mutant):
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    path, _, name = mutant.test.partition("::")
    functions = {
        node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
    }
    assert name.partition("[")[0] in functions
    assert mutant.why.endswith(".")
