"""The list of mutants keeps up with the code. `make evidence` tries them."""

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
