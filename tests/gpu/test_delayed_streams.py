"""Texts of a server whose streams fall behind each other at random, and whose buffers are overwritten behind each step.

**Not yet run on a GPU.** Which launches of streams are in order, ``tests/server/test_order.py`` shows on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from golden_server import CASES, generate, greedy, policy, relative_acceptance

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


@pytest.mark.parametrize("name", ["static", "off"])
@pytest.mark.parametrize("parameters", [{}, {"temperature": 0.8, "sampling_seed": 7}], ids=["greedy", "seeded"])
def test_texts_of_lone_requests_do_not_change(server, delayed, name, parameters):
    """Every token is the same: a request that runs alone has steps of the same shapes on both servers."""
    bodies, texts = [greedy(case["prompt_ids"], 64, parameters) for case in CASES], []
    for one in (server, delayed):
        one.flush_cache()
        with policy(one, name):
            texts.append([answer["output_ids"] for answer in generate(one, bodies, 1)])
    assert texts[0] == texts[1]
    assert "streams are delayed" in delayed.log_path.read_text()


def test_drafts_of_requests_that_come_and_go_are_accepted(delayed):
    """Their texts depend on the requests beside them, by the rounding of 16 bits."""
    assert relative_acceptance(delayed) > 0.5
