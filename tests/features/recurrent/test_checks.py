"""Flags that recurrent layers do not go with are adjusted, or refused with flag, value and remedy."""

import re

import pytest
from sglang_objects import found_by, launch_context

from sglang_dspark.engine.start import of_rules
from sglang_dspark.features import recurrent

HYBRID = {"architecture": "Qwen3_5ForCausalLM"}
CHOSEN = {"mamba_radix_cache_strategy": "extra_buffer"}


def found(**given):
    """Return the message of the check of snapshots, for a start with the golden drafter."""
    return found_by("snapshots of states", launch_context(**{"target": HYBRID} | CHOSEN | given))


def test_snapshots_follow_each_other_no_faster_than_steps_under_overlap():
    assert re.search("--mamba-track-interval=15 beside .*; pass 16 or more", found(mamba_track_interval=15))
    assert found(mamba_track_interval=16) is None
    assert found(mamba_track_interval=1, mamba_radix_cache_strategy="no_buffer") is None
    assert found(mamba_track_interval=1, target={}) is None


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ({"enable_hierarchical_cache": True}, {"enable_hierarchical_cache": False}),
        ({"enable_linear_replayssm_spec": True}, {"enable_linear_replayssm_spec": False}),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, {"mamba_radix_cache_strategy": "extra_buffer"}),
        ({"linear_attn_prefill_backend": "cutedsl"}, {"linear_attn_prefill_backend": "triton"}),
        ({"linear_attn_backend": "flashinfer"}, {"linear_attn_backend": "triton"}),
        ({"linear_attn_decode_backend": "flashinfer"}, {}),
    ],
    ids=str,
)
def test_flags_that_change_speed_alone(given, becomes):
    def adjusted(**more):
        context = launch_context(**{"prefill": None, "decode": None} | CHOSEN | given | more)
        return {one.name: one.value for one in of_rules(context)}

    assert adjusted(target=HYBRID) == becomes
    assert adjusted() == {}


@pytest.mark.parametrize(("device", "packed"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_convolutions_that_are_packed_on_a_cpu(monkeypatch, device, packed):
    monkeypatch.setattr(recurrent, "cpu_has_amx_support", lambda: packed)
    found = found_by("recurrent layers", launch_context(target=HYBRID, device=device))
    if device == "cpu" and packed:
        assert found.startswith("--model-path: target architecture Qwen3_5ForCausalLM is not served with DSPARK on cpu")
        assert "for AMX" in found and found.endswith("and run sglang-dspark enable-cpu")
    else:
        assert found is None
    assert found_by("recurrent layers", launch_context(device=device)) is None
