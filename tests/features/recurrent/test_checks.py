"""Features that are not served beside recurrent layers are refused with flag, value and remedy, and the rest passes."""

import re

import pytest
from sglang_objects import found_by, launch_context

from sglang_dspark.features.recurrent import checks

HYBRID = {"architecture": "Qwen3_5ForCausalLM"}
CHOSEN = {"mamba_radix_cache_strategy": "extra_buffer"}
REFUSED = [
    ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache", "drop the flag"),
    ({"enable_linear_replayssm_spec": True}, "--enable-linear-replayssm-spec", "drop the flag"),
    ({"enable_lora": True}, "--enable-lora", "drop the flag"),
    ({"lora_paths": ["x"]}, "--lora-paths", "drop the flag"),
    ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, "-strategy=extra_buffer_lazy", "pass extra_buffer"),
    ({"linear_attn_prefill_backend": "cutedsl"}, "--linear-attn-prefill-backend=cutedsl", "pass triton"),
    ({"linear_attn_backend": "flashinfer"}, "--linear-attn-prefill-backend=flashinfer", "pass triton"),
    ({"mamba_track_interval": 15}, "--mamba-track-interval=15", "pass 16 or more"),
]
SERVED = [
    {},
    {"mamba_track_interval": 16},
    {"mamba_radix_cache_strategy": "no_buffer", "mamba_track_interval": 1},
    {"linear_attn_backend": "cutedsl", "linear_attn_prefill_backend": "triton"},
]


def found(**given):
    """Return the message of the check of flags, for a start with the golden drafter."""
    return found_by("flags beside recurrent layers", launch_context(**{"target": HYBRID} | CHOSEN | given))


@pytest.mark.parametrize(("given", "flag", "remedy"), REFUSED, ids=lambda value: str(value)[:40])
def test_flags_that_are_refused(given, flag, remedy):
    assert re.search(f"{flag} beside a target with recurrent layers; {remedy}", found(**given))
    assert found(target={}, **given) is None


@pytest.mark.parametrize("given", SERVED, ids=str)
def test_flags_that_are_served(given):
    assert found(**given) is found(device="cpu", tp_size=2, **given) is None


@pytest.mark.parametrize(("device", "packed"), [("cpu", True), ("cpu", False), ("cuda", True)])
def test_convolutions_that_are_packed_on_a_cpu(monkeypatch, device, packed):
    monkeypatch.setattr(checks, "cpu_has_amx_support", lambda: packed)
    found = found_by("recurrent layers", launch_context(target=HYBRID, device=device))
    if device == "cpu" and packed:
        assert found.startswith("--model-path: target architecture Qwen3_5ForCausalLM is not served with DSPARK on cpu")
        assert "for AMX" in found and found.endswith("and run sglang-dspark enable-cpu")
    else:
        assert found is None
    assert found_by("recurrent layers", launch_context(device=device)) is None
