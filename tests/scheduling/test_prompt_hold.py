"""Between two prefills, decoding runs for as long as the first one took."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.scheduling.prompt_hold import PromptHold


class Device:
    """Works through what it is given, ``lag`` launches behind the host."""

    def __init__(self, most_s, lag):
        self.now = 0.0
        self.hold = PromptHold(most_s, lag, lambda: self.now)
        self.lag, self.ends = lag, []

    def run(self, seconds, *, prefill, host_s=0.0):
        """Launch something that takes so long, and wait as the scheduler does: for what came ``lag`` before."""
        self.hold.launched(prefill=prefill)
        self.now += host_s
        self.ends.append(max(self.now, self.ends[-1] if self.ends else 0.0) + seconds)
        self.now = max(self.now, self.ends[max(0, len(self.ends) - 1 - self.lag)])


def decode_until_released(device, seconds=1.0, running=4):
    steps = 0
    while device.hold.holds(running):
        device.run(seconds, prefill=False)
        steps += 1
        assert steps < 1000
    return steps


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("prefill_s", [3.0, 10.0])
def test_decoding_gets_as_long_as_the_prefill_took(lag, prefill_s):
    device = Device(1e9, lag)
    for _ in range(5):
        device.run(1.0, prefill=False)
    for _ in range(3):
        device.run(prefill_s, prefill=True)
        # The launch that shows how long it took decodes already.
        assert prefill_s <= decode_until_released(device) <= prefill_s + 1 + lag


@given(st.lists(st.floats(0.1, 20.0), min_size=1, max_size=10), st.sampled_from([0, 1]), st.floats(0.1, 5.0))
def test_decoding_gets_at_least_half_of_the_time(prefills, lag, step_s):
    device = Device(1e9, lag)
    device.run(step_s, prefill=False)
    decoded = 0.0
    for seconds in prefills:
        device.run(seconds, prefill=True)
        decoded += step_s * decode_until_released(device, step_s)
    assert decoded >= sum(prefills) - 1e-6


@pytest.mark.parametrize("lag", [0, 1])
def test_a_prefill_that_the_host_launches_slowly_counts(lag):
    """Kernel by kernel, the device is done when the host is."""
    device = Device(1e9, lag)
    device.run(1.0, prefill=False)
    device.run(0.0, prefill=True, host_s=12.0)
    assert 11 <= decode_until_released(device) <= 14


@pytest.mark.parametrize("lag", [0, 1])
def test_chunks_of_a_prompt_add_up(lag):
    device = Device(1e9, lag)
    device.run(1.0, prefill=False)
    for _ in range(3):
        device.run(5.0, prefill=True)
    assert decode_until_released(device) >= 14 - lag


def test_nobody_waits_where_nothing_runs():
    device = Device(1e9, 1)
    device.run(10.0, prefill=True)
    assert device.hold.holds(1)
    assert not device.hold.holds(0)
    device.run(1.0, prefill=False)
    assert not device.hold.holds(1)  # and what was owed is forgotten


def test_nobody_waits_for_longer_than_allowed():
    device = Device(2.5, 0)
    device.run(100.0, prefill=True)
    assert decode_until_released(device) == 3
    device.run(100.0, prefill=True)
    assert decode_until_released(device) == 3


def test_it_can_be_switched_off():
    device = Device(0.0, 1)
    device.run(100.0, prefill=True)
    assert not device.hold.holds(8)


def test_time_that_passes_without_prompts_counts():
    device = Device(1e9, 1)
    device.run(5.0, prefill=True)
    for _ in range(8):
        device.run(1.0, prefill=False)
    assert not device.hold.holds(4)
