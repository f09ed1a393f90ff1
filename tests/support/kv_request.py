"""Requests of SGLang with K/V of their own, as its scheduler has them while they decode."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams


def kv_request(*, row: int, committed: int = 0, allocated: int = 0) -> Req:
    """A request in this row of ``req_to_token``, with so many tokens committed and slots for so many."""
    req = Req("r", "", [0], SamplingParams())
    for name, value in {"req_pool_idx": row, "kv_committed_len": committed, "kv_allocated_len": allocated}.items():
        assert hasattr(req.kv, name)
        setattr(req.kv, name, value)
    return req
