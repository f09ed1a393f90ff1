"""A failing function that only advises costs its advice alone; that shows in the log once, and in a count."""

import logging

import pytest

from sglang_dspark.errors import FAILURES, fenced, nothing


@pytest.fixture(autouse=True)
def failures():
    yield FAILURES
    FAILURES.clear()


@fenced("halves", instead=lambda number: -number)
def half(number):
    if number % 2:
        raise ValueError(number)
    return number // 2


def test_a_failure_is_replaced_logged_once_and_counted(caplog, failures):
    assert [half(number) for number in (4, 3, 5)] == [2, -3, -5]
    assert failures == {"halves": 2}
    (record,) = caplog.records
    assert (record.levelno, "halves" in record.getMessage()) == (logging.ERROR, True)
    assert record.exc_info[0] is ValueError


def test_what_returns_nothing_returns_nothing(failures):
    seen = []

    @fenced("notes", instead=nothing)
    def note(number, *, fails):
        seen.append(number)
        if fails:
            raise KeyError(number)

    assert (note(1, fails=False), note(2, fails=True)) == (None, None)
    assert seen == [1, 2] and failures == {"notes": 1}


def test_an_end_of_the_process_is_no_failure(failures):
    @fenced("ends", instead=nothing)
    def end():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        end()
    assert not failures
