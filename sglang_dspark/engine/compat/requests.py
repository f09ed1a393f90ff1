"""A request's K/V bookkeeping: on the request once, now in a record of its own.

A write to the wrong place would make an attribute there and leak slots without a word, hence one way to write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import sglang.srt.managers.schedule_batch as schedule_batch

_RECORD = getattr(schedule_batch, "ReqKvInfo", None)
_IN_RECORD = frozenset(field.name for field in dataclasses.fields(_RECORD)) if _RECORD else frozenset()


def _owner(req: Any, name: str) -> Any:
    return req.kv if name in _IN_RECORD else req


def lengths(reqs: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Tokens whose K/V is valid as the host knows, and tokens that slots are reserved for: of every request."""
    records = [req.kv for req in reqs] if _IN_RECORD else reqs
    committed = records if "kv_committed_len" in _IN_RECORD else reqs
    allocated = records if "kv_allocated_len" in _IN_RECORD else reqs
    return [owner.kv_committed_len for owner in committed], [owner.kv_allocated_len for owner in allocated]


def committed_len(req: Any) -> int:
    """Tokens whose K/V is valid, as the host knows."""
    return int(_owner(req, "kv_committed_len").kv_committed_len)


def allocated_len(req: Any) -> int:
    """Tokens that slots are reserved for."""
    return int(_owner(req, "kv_allocated_len").kv_allocated_len)


def set_allocated_len(req: Any, length: int) -> None:
    """Note that slots are reserved for ``length`` tokens."""
    _owner(req, "kv_allocated_len").kv_allocated_len = length


def row(req: Any) -> int:
    """Row of ``req_to_token``."""
    return int(_owner(req, "req_pool_idx").req_pool_idx)
