"""The worker's CUDA-graph path in a real server without a GPU: graphs as plain calls, kernels interpreted.

The work of a GPU's streams on the same memory is ordered by waits; see emulated_graphs/order.py.
"""

from __future__ import annotations

import json
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from faults import GRAPH, VARIABLE
from golden_server import (
    DRAFT,
    DRAFTER_ALONE,
    DSPARK,
    EMULATION,
    PACE_MS,
    TARGET,
    TOL,
    VOCAB,
    assert_nothing_was_awaited,
    emulated_graphs,
    endless,
    generate,
    greedy,
    in_background,
    output_ids,
    policy,
    rounds_of,
    states_of,
    wait_for_running,
)
from safetensors.torch import load_file
from server_pool import Recipe

from sglang_dspark.errors import LaunchError

CASES = json.loads((DRAFT / "golden.json").read_text())["cases"][:3]
GAMMA = 7  # of the drafter
TOKENS = 4  # an interpreted step takes a tenth of a second


def bodies(**fields: Any) -> list[dict[str, Any]]:
    return [greedy(case["prompt_ids"], TOKENS, **fields) for case in CASES]


def expected() -> list[list[int]]:
    return [case["output_ids"][:TOKENS] for case in CASES]


def test_steps_are_replayed_from_graphs(graphs):
    """Or everything below would test the path of a CPU."""
    assert "CUDA graphs for up to 2 requests" in graphs.log_path.read_text()
    assert graphs.get_json("/dspark/stats")["policy"] == "auto"


def test_what_no_gpu_has_run_is_off_unless_it_is_named(graphs):
    """Of other servers it is named: test_targets.py."""
    paths = graphs.get_json("/dspark/capabilities")["gpu_paths"]
    assert {name for name in ("prompt-rows", "held-rows", "survivals", "int8") if paths[name]["on"]} == {"prompt-rows"}
    assert paths["fused-graphs"]["on"] and "off without --speculative-dspark-unproven" in paths["held-rows"]["why"]
    assert "draft K/V: steps that draft nothing leave theirs" not in graphs.log_path.read_text()


def test_the_start_has_checked_its_kernels_and_graphs(graphs):
    """As far as it comes in its seconds: interpreted, a kernel takes as long as a hundred do on a GPU."""
    found = graphs.get_json("/dspark/capabilities")
    assert found["gpu_paths"]["self-check"]["on"] and not found["self_check"]["unchecked"]
    assert found["self_check"]["kernels"] > 8 and found["self_check"]["graphs"] >= 2
    [said] = re.findall(r"logits of 12 rows .* by at most ([\d.e-]+); the", graphs.log_path.read_text())
    assert float(said) < TOL


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        *("add_norm", "qk_norm_rope", "kv_inject", "window_attention", "draft_block", "accept", "prepare"),
        *("plan_top", "plan_staged", GRAPH),
    ],
)
def test_a_start_ends_with_the_name_of_what_is_wrong(name, server_pool, tmp_path):
    flags = (*DSPARK, "--max-running-requests 4", "--speculative-dspark-self-check")
    env = {**emulated_graphs(), VARIABLE: name, "HOME": str(tmp_path)}  # where nothing was checked before
    named = pytest.raises(LaunchError, match=f"the self-check found a fault in {name} on")
    with named, server_pool.lent(Recipe(flags, env), tmp_path):
        pass


def test_golden_traces_of_replayed_steps(graphs):
    with policy(graphs, "static"):
        answers = generate(graphs, bodies(speculation=DRAFTER_ALONE), 1)
    for answer, case, ids in zip(answers, CASES, expected(), strict=True):
        assert answer["output_ids"] == ids
        rounds = rounds_of(answer)
        golden = case["rounds"][: len(rounds)]
        assert [(r["start"], r["draft"][:GAMMA]) for r in rounds] == [(r["start"], r["draft"]) for r in golden]
        # The last round runs past the tokens that were asked for.
        assert [r["accepted"] for r in rounds[:-1]] == [r["accepted"] for r in golden[:-1]]


@pytest.mark.thorough
def test_long_contexts_are_split(graphs, plain):
    """One request's context is shared out among programs where there is no other one."""
    body = greedy([5 + 7 * i % 200 for i in range(700)], TOKENS, return_logprob=True)

    def surprises(server: Any, alike: int) -> list[Any]:
        answers = generate(server, [body] * alike, alike)
        return [[logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]] for answer in answers]

    [alone] = surprises(plain, 1)
    with policy(graphs, "static", verify_len=GAMMA):  # rows of one window, or of two
        for alike in (1, 2):
            assert surprises(graphs, alike) == [pytest.approx(alone, abs=1e-4)] * alike


@pytest.mark.thorough
def test_blocks_go_on_after_the_drafters(graphs):
    with policy(graphs, "static"):
        body = greedy(CASES[0]["prompt_ids"], 40, speculation={"preset": "summarization", "trace": True})
        [answer] = generate(graphs, [body], 1)
    assert answer["output_ids"] == CASES[0]["output_ids"][:40]
    assert max(entry["accepted"] for entry in rounds_of(answer)) > GAMMA


@pytest.mark.thorough
def test_adjusted_logits_are_not_judged_by_a_graph(graphs):
    """A bias that forbids a token of the golden text keeps it out; a neighbour has its own text."""
    forbidden = expected()[0][1]
    biased = greedy(CASES[0]["prompt_ids"], TOKENS, {"logit_bias": {str(forbidden): -100.0}})
    for name in ("static", "off"):
        with policy(graphs, name):
            changed, kept = output_ids(graphs, [biased, bodies()[1]], 2)
        assert forbidden not in changed
        assert kept == expected()[1]


@pytest.mark.thorough
def test_log_probabilities_and_hidden_states_are_those_of_eager_steps(graphs):
    """A graph that accepts drafts keeps nothing else for others: requests that read it are judged outside."""
    body = bodies()[0] | {"return_logprob": True, "top_logprobs_num": 1, "return_hidden_states": True}
    embedding = load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"]  # the LM head, too
    for name in ("static", "off"):
        with policy(graphs, name):
            [answer] = generate(graphs, [body], 1)
        assert answer["output_ids"] == expected()[0]
        info = answer["meta_info"]
        chosen = [token for _, token, *_ in info["output_token_logprobs"]]
        best = [tokens[0][1] for tokens in info["output_top_logprobs"]]
        assert chosen == best == (states_of(answer) @ embedding.T).argmax(1).tolist() == expected()[0]


@pytest.mark.thorough
def test_every_step_draws_with_noise_of_its_own(graphs):
    """Requests that follow each other in few rows draft more blocks after one anchor than there are rows."""
    rows = graphs.get_json("/server_info")["max_running_requests"]
    # Half of them or more have the same anchor.
    body = endless(CASES[0]["prompt_ids"], 2, {"temperature": 2.0, "top_k": 2}, speculation={"trace": True})
    drafts: dict[int, set[tuple[int, ...]]] = {}
    with policy(graphs, "static"):
        for answer in generate(graphs, [body] * (4 * rows), 1):
            first = rounds_of(answer)[0]
            drafts.setdefault(first["anchor"], set()).add(tuple(first["draft"]))
    assert max(map(len, drafts.values())) > rows


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.0, "sampling_seed": 7},
    {"temperature": 0},
]


def test_nothing_is_read_back_in_a_step(graphs):
    """Neither the tests above nor this one wait for the device; emulated_graphs/waits.py names what would."""
    for name, distribution in zip(("off", "static", "auto"), (SAMPLED[0], *SAMPLED[:2]), strict=True):
        with policy(graphs, name):
            body = {"input_ids": CASES[0]["prompt_ids"], "sampling_params": {"max_new_tokens": 3, **distribution}}
            output_ids(graphs, [body, greedy(CASES[1]["prompt_ids"], 3)], 2)
    assert_nothing_was_awaited(graphs)


@pytest.mark.thorough
def test_nothing_is_compiled_in_a_request(graphs):
    """Nor does what seeds and greedy neighbours write depend on others: more than were captured, and copied drafts."""
    prompt = CASES[0]["prompt_ids"]
    mixed = [{"input_ids": prompt, "sampling_params": {"max_new_tokens": 3, **one}} for one in SAMPLED]
    copying = {"speculation": {"preset": "summarization", "min_ngram": 1}}
    [seeded] = output_ids(graphs, mixed[2:3], 1)
    output_ids(graphs, mixed[:1] * 4, 4)
    output_ids(graphs, [mixed[0] | copying, mixed[1], mixed[0] | copying, mixed[1] | copying], 2)
    for settings in ({"name": "static", "verify_len": 1}, {"name": "static", "verify_len": 6}, {"name": "auto"}):
        with policy(graphs, **settings):
            assert output_ids(graphs, mixed, 4)[2:] == [seeded, expected()[0][:3]]
            assert output_ids(graphs, mixed[3:] * 3, 3) == [expected()[0][:3]] * 3
    assert "forms of kernels compiled at start-up" in assert_nothing_was_awaited(graphs)


def test_a_step_is_launched_in_few_pieces(graphs):
    """The host submits few graphs and kernels for greedy requests, and torch launches little else."""
    # Next to the graphs the step is staged and the result is packed; in some steps that draft, coefficients of the
    # calibration are renewed.
    most = {"static": (2, 1, 2), "auto": (2, 1, 2), "off": (1, 1, 1)}
    for name, bounds in most.items():
        with policy(graphs, name):
            output_ids(graphs, bodies()[:2], 2)  # the first steps of a kind make what the next ones share
            before = len(graphs.log_path.read_text())
            assert output_ids(graphs, bodies()[:2], 2) == expected()[:2]
        launched = r"launched by a step of (\d) by .*: (\d+) graphs, (\d+) kernels, (\d+) operations: (.*)"
        steps = re.findall(launched, graphs.log_path.read_text()[before:])
        assert len(steps) > 1
        last = steps[0][0]
        for requests, *counts, what in steps:
            # A request that comes makes a new batch. One that has left has its draft K/V written after non-speculative
            # steps.
            few = all(int(count) <= bound for count, bound in zip(counts, bounds, strict=True))
            assert few or requests != last, what
            last = requests
            assert int(counts[0]) > 0


def test_short_prompts_are_replayed(graphs, plain):
    """Up to two blocks of twelve rows, after prefixes of any length; nothing else of their prefill but its end."""
    draw = random.Random(5)
    known, *new = (draw.choices(VOCAB, k=length) for length in (40, 1, 13, 24, 25))
    asked = [greedy(prompt, 2) for prompt in (known, *new, *(known + prompt for prompt in new[1:3]))]
    texts, began = output_ids(plain, asked), len(graphs.log_path.read_text())
    graphs.flush_cache()
    before = graphs.get_json("/dspark/stats")["prompts"]
    with policy(graphs, "static"):  # non-speculative steps leave draft K/V to what comes next
        assert output_ids(graphs, asked, 1) == texts
    launched = r"launched by a prefill of (\d+) rows: (\d+) graphs, (\d+) kernels, (\d+) operations"
    log = assert_nothing_was_awaited(graphs, began)
    prefills = [tuple(map(int, found)) for found in re.findall(launched, log)]
    assert [rows for rows, *_ in prefills] == [40, *map(len, new), 13, 24]
    for rows, *counts, operations in prefills:
        # Two kernels draw the first token. Of the drafter's K/V, which are no graph's, an interpreter launches as torch
        # what a GPU does in one kernel.
        assert (counts == [1, 4] and operations < 60) if rows <= 24 else (counts == [0, 2] and operations > 400)
    after = graphs.get_json("/dspark/stats")["prompts"]
    grown = {name: after[name] - count for name, count in before.items()}
    assert grown == {"verification": 5, "prefill": 2, "beside": 0}


def test_drafts_are_verified_next_to_prompts(graphs, plain):
    """A block of a prompt and one of drafts fill the largest graph."""
    draw = random.Random(6)
    running = endless(draw.choices(VOCAB, k=9), 48)
    asked = [greedy(draw.choices(VOCAB, k=length), 1) for length in (12, 7)]
    texts, found = output_ids(plain, [running, *asked], 1), []
    graphs.flush_cache()
    before, began = graphs.get_json("/dspark/stats"), len(graphs.log_path.read_text())
    with policy(graphs, "static", pace_ms=10 * PACE_MS):  # its few tokens take few steps
        thread = in_background(lambda: found.extend(output_ids(graphs, [running], 1)))
        wait_for_running(graphs, 1)
        found_with = output_ids(graphs, asked, 1)
    thread.join()
    assert found + found_with == texts
    after = graphs.get_json("/dspark/stats")
    assert after["prompts"]["beside"] - before["prompts"]["beside"] == 2
    assert after["drafts_beside_prompts"]["verified"] - before["drafts_beside_prompts"]["verified"] == 2 * 11
    assert_nothing_was_awaited(graphs, began)


ORDERS = json.loads((DRAFT / "golden.json").read_text())["cases"][:4]


@pytest.mark.thorough
def test_streams_of_a_server_are_in_order(ordered):
    """Under overlap: requests that come, end and are sampled with others, with and without drafts, next to prompts."""
    for name in ("auto", "static", "off"):
        with policy(ordered, name):
            bodies = [
                greedy(case["prompt_ids"], 4 + 3 * place, {"temperature": place % 2}, return_logprob=place == 2)
                for place, case in enumerate(ORDERS)
            ]
            generate(ordered, bodies, 3)
    with policy(ordered, "static", pace_ms=10 * PACE_MS):
        running = in_background(
            lambda: generate(ordered, [endless(ORDERS[0]["prompt_ids"], 48, speculation={"max_verify": 1})], 1)
        )
        wait_for_running(ordered, 1)
        generate(ordered, [greedy(case["prompt_ids"][3:8], 2) for case in ORDERS], 1)
    running.join()
    log = ordered.log_path.read_text()
    assert "streams are watched" in log and "launched by a step next to prompts of 1 by" in log
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


def a_write_after_a_read(order: Any, one: Any, other: Any, memory: torch.Tensor) -> None:
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
        *((told, False) for told in (two_writes, a_write_after_a_read, an_event_too_early, a_host_that_does_not_wait)),
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
