"""A request's K/V bookkeeping is written where this SGLang reads it, and nowhere else."""

import pytest
from kv_request import kv_request, owner_of

from sglang_dspark.engine.compat import requests


def test_values_are_found():
    req = kv_request(row=7, committed=3, allocated=5)
    assert (requests.committed_len(req), requests.allocated_len(req), requests.row(req)) == (3, 5, 7)
    assert requests.lengths([req, kv_request(row=1, committed=4, allocated=6)]) == ([3, 4], [5, 6])


@pytest.mark.parametrize("name", ["kv_committed_len", "kv_allocated_len", "req_pool_idx"])
def test_a_write_reaches_the_one_place_that_is_read(name):
    req = kv_request(row=7, committed=3, allocated=5)
    before = set(vars(req))
    requests.set_allocated_len(req, 9)
    assert requests.allocated_len(req) == 9
    assert set(vars(req)) == before, "slots that are noted beside the record leak"
    owner_of(req, name)  # still one
