"""A window of the drafter's context changes drafts, and no text."""

import pytest
from stage_loop import StageLoop

from sglang_dspark.draft.window import DraftWindow


def served(window):
    """Texts and traces of two golden prompts."""
    loop = StageLoop(schedule="static")
    loop.drafter.window = window
    prompts = [case.prompt_ids for case in loop.golden.cases[:2]]
    return loop.serve(prompts, 10), loop.traces


@pytest.fixture(scope="module")
def whole():
    return served(None)


def test_a_window_of_the_whole_context_changes_nothing(whole):
    assert served(DraftWindow(500, 4)) == whole


def test_a_narrow_window_changes_drafts_alone(whole):
    texts, traces = served(DraftWindow(3, 1))
    assert texts == whole[0]
    assert traces != whole[1]
