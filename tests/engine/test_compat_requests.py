"""A request's K/V bookkeeping is written where this SGLang reads it, and nowhere else."""

from types import SimpleNamespace

import pytest
from sglang.srt.managers import schedule_batch

from sglang_dspark.engine.compat import requests


def fresh_request():
    """A request of SGLang, with what its constructor sets of its K/V; ``slots`` refuses a stray attribute."""
    record = getattr(schedule_batch, "ReqKvInfo", None)
    if record is None:
        return SimpleNamespace(kv_committed_len=3, kv_allocated_len=5, req_pool_idx=7)
    names = set(record.__slots__)
    values = {"kv_committed_len": 3, "kv_allocated_len": 5, "req_pool_idx": 7}
    kv = record(**{name: value for name, value in values.items() if name in names})
    return SimpleNamespace(kv=kv, **{name: value for name, value in values.items() if name not in names})


def test_values_are_found():
    req = fresh_request()
    assert (requests.committed_len(req), requests.allocated_len(req), requests.row(req)) == (3, 5, 7)


def test_a_write_reaches_the_place_that_is_read():
    req = fresh_request()
    before = set(vars(req))
    requests.set_allocated_len(req, 9)
    assert requests.allocated_len(req) == 9
    assert set(vars(req)) == before, "slots that are noted beside the record leak"


@pytest.mark.parametrize("name", ["kv_committed_len", "kv_allocated_len", "req_pool_idx"])
def test_each_name_has_one_owner(name):
    req = fresh_request()
    owners = [owner for owner in (req, getattr(req, "kv", None)) if owner is not None and hasattr(owner, name)]
    assert len(owners) == 1
