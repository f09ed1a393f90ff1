"""The log names kernels that Triton compiles after start-up."""

import logging

import pytest
import triton
from dspark_kernels import is_crowded, num_splits

from sglang_dspark.worker.warm_up import of_every_attention, report_late_kernels, sizes, widths


def test_kernels_of_ours_are_reported(caplog, monkeypatch):
    hook = triton.knobs.runtime.kernel_load_end_hook
    monkeypatch.setattr(hook, "calls", [])
    report_late_kernels()
    report_late_kernels()
    with caplog.at_level(logging.WARNING):
        hook(None, None, "_plan_kernel", {}, "0123456789abcdef")
        hook(None, None, "somebody_elses_kernel", {}, "0123456789abcdef")
    [record] = caplog.records
    assert "_plan_kernel" in record.getMessage()


@pytest.mark.parametrize(
    ("most", "expected"), [(0, []), (1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (64, [1, 2, 4, 8, 16, 32, 64])]
)
def test_sizes_reach_every_power_of_two(most, expected):
    """That of the largest batch included, which kernels round up."""
    assert sizes(most) == expected


@pytest.mark.parametrize(("most", "expected"), [(0, []), (1, [1]), (4, [1, 3, 4]), (7, [1, 3, 7]), (8, [1, 3, 7, 8])])
def test_widths_reach_every_window(most, expected):
    """A window is an anchor and its drafts."""
    assert widths(most) == expected


@pytest.mark.parametrize("processors", [132, 148])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("most", [1, 64, 133, 256, 512])
def test_attention_is_compiled_in_every_form(most, kv_heads, processors):
    """With one K/V head per rank, contexts are split up to 132 requests, whose windows have more rows than graphs."""

    def forms(requests):
        batches = ((num, kv_heads, processors) for num in requests)
        return {(num_splits(*batch) == 1, is_crowded(*batch)) for batch in batches}

    compiled = of_every_attention(most, kv_heads, processors)
    assert forms(compiled) == forms(range(1, most + 1))
    assert max(compiled) <= most
