"""Experts of verified rows, in the memory in which SGLang looks for those of a text."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.state_capturer import routed_experts
from sglang.srt.state_capturer.base import BaseDeviceCache, BaseTopkCapturer

from sglang_dspark.features.experts import RoutedExperts

LAYERS, TOP, SLOTS = 2, 2, 32


class Capturer(routed_experts.RoutedExpertsCapturer):
    """SGLang's, in ordinary memory."""

    def __init__(self, rows):
        self.num_layers, self.topk_size = LAYERS, TOP
        self.host_cache = SimpleNamespace(buffer=torch.zeros(SLOTS, LAYERS, TOP, dtype=torch.int32))
        self.device_cache = BaseDeviceCache(rows, LAYERS, TOP, "cpu", "experts")

    capture = BaseTopkCapturer.capture


@pytest.fixture
def capturer():
    """SGLang's, of a server for two requests."""
    made = Capturer(2)
    routed_experts.set_global_experts_capturer(made)
    yield made
    routed_experts.set_global_experts_capturer(None)


@pytest.fixture
def step(capturer):
    """Verifies rows with these slots; another step overwrites what the device has of them. Each may have 3 drafts."""
    runner = SimpleNamespace(max_running_requests=2)
    args = SimpleNamespace(disable_overlap_schedule=False)
    made = RoutedExperts(
        SimpleNamespace(model_runner=runner, max_verify=3, device=torch.device("cpu"), server_args=args)
    )
    made.attention_made()

    def step(slots, experts):
        slots = torch.tensor(slots)
        for layer in range(LAYERS):
            capturer.capture(layer, torch.tensor(experts)[:, None] * 10 + torch.tensor([layer, layer + 5]))
        result = SimpleNamespace()
        made.step_launched(SimpleNamespace(slots=slots), result)
        slots.zero_()
        capturer.device_cache.buffer.fill_(99)
        return result.routed_experts_output

    return step


def test_there_is_room_for_the_rows_of_the_largest_step(step, capturer):
    output = step(range(8), range(8))
    output.finalize()
    assert capturer.host_cache.buffer[:8, 1].tolist() == [[10 * row + 1, 10 * row + 6] for row in range(8)]


def test_rows_that_were_accepted_are_what_is_read(step, capturer):
    """A slot of a rejected draft is the next step's; and a graph's rows after the requests' have slot 0."""
    steps = [step([4, 5, 6, 7], [1, 2, 3, 4]), step([6, 7, 0, 0], [8, 9, 7, 7])]
    for output in steps:
        output.finalize()
    table = SimpleNamespace(req_to_token=torch.tensor([[4, 5, 6, 7]]))
    rows = capturer.get_topk(0, 5, table)
    assert (rows[:, 0, 0] // 10).tolist() == [1, 2, 8, 9]
