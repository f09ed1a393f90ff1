"""The work of a GPU's streams on the same memory is ordered by waits; see emulated_graphs/order.py."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from golden_server import (
    DRAFT,
    EMULATION,
    PACE_MS,
    endless,
    generate,
    greedy,
    in_background,
    policy,
    wait_for_running,
)

CASES = json.loads((DRAFT / "golden.json").read_text())["cases"][:4]


@pytest.mark.thorough
def test_streams_of_a_server_are_in_order(ordered):
    """Under overlap: requests that come, end and are sampled beside others, with and without drafts, beside prompts."""
    for name in ("auto", "static", "off"):
        with policy(ordered, name):
            bodies = [
                greedy(case["prompt_ids"], 4 + 3 * place, {"temperature": place % 2}, return_logprob=place == 2)
                for place, case in enumerate(CASES)
            ]
            generate(ordered, bodies, 3)
    with policy(ordered, "static", pace_ms=10 * PACE_MS):
        running = in_background(
            lambda: generate(ordered, [endless(CASES[0]["prompt_ids"], 48, speculation={"max_verify": 1})], 1)
        )
        wait_for_running(ordered, 1)
        generate(ordered, [greedy(case["prompt_ids"][3:8], 2) for case in CASES], 1)
    running.join()
    log = ordered.log_path.read_text()
    assert "streams are watched" in log and "launched by a step beside prompts of 1 by" in log
    assert [line for line in log.splitlines() if "in no order" in line] == []


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module that servers import, watching this thread."""
    monkeypatch.syspath_prepend(EMULATION)
    import order  # type: ignore[import-not-found]

    with order.Launches():
        yield order
    del sys.modules["order"]


def write(order: Any, stream: Any, memory: torch.Tensor) -> None:
    with order.StreamContext(stream):
        memory.add_(1)


def read(order: Any, stream: Any, memory: torch.Tensor) -> None:
    with order.StreamContext(stream):
        memory.sum()


def two_writes(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    write(order, one, memory)
    write(order, other, memory)


def a_write_behind_a_read(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    read(order, one, memory)
    write(order, other, memory[2:])


def an_event_too_early(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    event = one.record_event()
    write(order, one, memory)
    other.wait_event(event)
    read(order, other, memory)


def a_host_that_does_not_wait(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    write(order, one, memory)
    memory[0].item()


def two_reads(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    read(order, one, memory)
    read(order, other, memory)


def two_halves(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    write(order, one, memory[:2])
    write(order, other, memory[2:])


def a_wait(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    write(order, one, memory)
    other.wait_event(one.record_event())
    write(order, other, memory)


def a_host_that_waits(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    write(order, one, memory)
    one.record_event().synchronize()
    memory[0].item()
    write(order, other, memory)  # launched by the host, which knows


def allocated(order: Any, one: Any, other: Any) -> torch.Tensor:
    """Memory of ``one`` that ``other`` reads in order."""
    with order.StreamContext(one):
        made = torch.zeros(4)
    other.wait_stream(one)
    read(order, other, made)
    return made


def memory_given_back(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    allocated(order, one, other)


def memory_recorded(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    order.record_stream(allocated(order, one, other), other)


def memory_given_back_behind_a_wait(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
    made = allocated(order, one, other)
    one.wait_stream(other)
    del made


@pytest.mark.parametrize(
    ("told", "in_order"),
    [
        *((told, False) for told in (two_writes, a_write_behind_a_read, an_event_too_early, a_host_that_does_not_wait)),
        *((told, True) for told in (two_reads, two_halves, a_wait, a_host_that_waits)),
        (memory_given_back, False),
        *((told, True) for told in (memory_recorded, memory_given_back_behind_a_wait)),
    ],
)
def test_what_is_in_no_order_is_reported(
    order: Any, told: Callable[..., None], in_order: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = order.Stream(), order.Stream()
    memory = torch.zeros(4)
    for stream in (one, other):
        stream.wait_stream(order.current_stream())
    with caplog.at_level(logging.WARNING):
        told(order, one, other, memory)
    assert bool(caplog.records) != in_order
