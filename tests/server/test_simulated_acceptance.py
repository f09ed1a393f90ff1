"""Servers of random weights that keep drafts by chance: ours, replayed as on a GPU, and SGLang's own worker."""

from __future__ import annotations

from array import array
from itertools import pairwise
from zlib import crc32

import pytest
import torch
from dspark_kernels import SimulatedDraws, simulated_accept
from golden_server import generate, policy, prompts

from sglang_dspark.scheduling.sts import acceptance_law
from sglang_dspark.tools.launch import LaunchedServer

pytestmark = pytest.mark.thorough
RATES = (0.9, 0.6, 0.8, 0.7, 0.7, 0.7, 0.7)
PROMPTS = prompts(9, seed=5)


def answers(server: LaunchedServer, **given):
    parameters = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    bodies = [{"input_ids": prompt, "sampling_params": parameters, **given} for prompt in PROMPTS]
    return generate(server, bodies, 4)


def steps_of(answer):
    """Return how many steps a request took, and how many of these kept 0, 1, ... drafts."""
    return answer["meta_info"]["spec_verify_ct"], answer["meta_info"]["spec_correct_drafts_histogram"]


def test_both_workers_take_the_same_steps(simulated, simulated_builtin):
    """They are the same whichever requests share the steps."""
    with policy(simulated, "static"):
        ours = [steps_of(answer) for answer in answers(simulated)]
    own = [steps_of(answer) for answer in answers(simulated_builtin)]
    assert ours == own
    assert len({steps for steps, _ in own}) > 2  # requests end apart


@pytest.mark.parametrize(
    ("name", "fields", "most"), [("static", {}, 7), ("static", {"verify_len": 2}, 2), ("auto", {}, 7)]
)
def test_drafts_are_kept_by_key_and_position(simulated, name, fields, most):
    with policy(simulated, name, **fields):
        found = answers(simulated, speculation={"trace": True})
    law = torch.from_numpy(acceptance_law(RATES))
    for prompt, answer in zip(PROMPTS, found, strict=True):
        ids, trace = answer["output_ids"], answer["meta_info"]["dspark_trace"]
        draws = SimulatedDraws(torch.tensor([crc32(array("q", prompt).tobytes())]), law)
        starts = [place for place, entry in enumerate(trace) if entry is not None]
        assert len(ids) == 40 and len(starts) > 4
        # The last round may run past the tokens that were asked for.
        for start, end in pairwise(starts):
            entry = trace[start]
            assert ids[start : end - 1] == entry["draft"][: entry["accepted"]] and end - start == entry["accepted"] + 1
            anchor = torch.tensor([len(prompt) + start - 1])
            row, block = torch.zeros(1, dtype=torch.int64), torch.zeros((1, 7), dtype=torch.int64)
            kept = simulated_accept(draws, row, anchor, block, row).accept_lens
            assert entry["accepted"] == min(int(kept), entry["verified"]) and entry["verified"] <= most


def test_simulated_acceptance_is_announced(simulated, simulated_builtin):
    assert simulated.get_json("/dspark/capabilities")["simulated_acceptance"] == [*RATES]
    for server in (simulated, simulated_builtin):
        assert "acceptance is simulated" in server.log_path.read_text()
