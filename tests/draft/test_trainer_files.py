"""Files that trainers wrote themselves (benchmarks/trainers/compare.py at commit 5c09792)."""

import json

import pytest
from format_exports import REAL

from sglang_dspark.draft.formats import read_content
from sglang_dspark.tools.provenance import REPOSITORY

TRAINERS = json.loads((REPOSITORY / "benchmarks" / "results" / "trainers.json").read_text())["trainers"]


@pytest.mark.parametrize(("trainer", "drafter"), REAL)
def test_files_of_trainers_are_read_without_a_question(trainer, drafter):
    kept = REAL[trainer, drafter]
    reading = read_content(kept["config"], origin="config.json", shapes=kept["shapes"])
    assert reading.config == read_content(kept["read"], origin="canonical").config
    assert reading.format == TRAINERS[trainer]["drafters"][drafter]["format"]
    assert reading.unknown_keys == () and not any(remark.doubtful for remark in reading.remarks)


def test_drafters_of_trainers_draft_here_as_they_do_there():
    refused = []
    for trainer, found in TRAINERS.items():
        for drafter, case in found["drafters"].items():
            if "refused" in case:
                refused.append((trainer, drafter))
            else:
                assert max(case["worst_difference"].values()) < 1e-4, (trainer, drafter)
                assert (case["equal_blocks"], case["questions"]) == ("5 of 5", []), (trainer, drafter)
    assert refused == [("speculators", "dspark, anchor does not predict, rnn")]
