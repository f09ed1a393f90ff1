"""The gated delta rule over ragged rows, and a commit that replays what was accepted.

Values are compared with those of SGLang: test_stock_recurrence.py.
"""

import pytest
import torch
from dspark_kernels import commit_gated_delta, commit_gated_delta_ref, gated_delta, gated_delta_ref
from recurrent_rows import Rows, part, replayed, served

HEADS, DIMS = (2, 4), (5, 3)
LENS, SLOTS = [3, 0, 1, 4], [4, 2, -1, 1]
TOL = {"atol": 2e-6, "rtol": 2e-5}  # float32 sums of up to 40 products, in another order
FORMS = [(gated_delta_ref, commit_gated_delta_ref), (gated_delta, commit_gated_delta)]
BOTH = pytest.mark.parametrize("forms", FORMS, ids=["reference", "kernel"])


@BOTH
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16], ids=str)
def test_several_rows_equal_as_many_decode_steps(forms, pool_dtype, device):
    """Also where a decode rounds the state that it stores."""
    verify, commit = forms
    made = Rows(device)
    q, inputs, gates = made.delta(5, (1, 2), (6, 3))
    pools = made.rand(1, 2, 2, 3, 6, dtype=pool_dtype)
    left, rows = pools.clone(), made.state_rows([5], [1])
    out = verify(q, inputs, gates, pools[0], rows)
    commit(part(inputs, None), part(gates, None), left, replayed(rows, [5]))
    one = made.state_rows([1], [1])
    for row in range(5):
        at = slice(row, row + 1)
        assert torch.equal(verify(q[at], part(inputs, at), gates, pools[0], one), out[at])
        commit(part(part(inputs, at), None), part(gates, None), pools, replayed(one, [1]))
    assert torch.equal(left, pools)


def states_after(forms, steps, device):
    """States of requests that are served speculatively, and by plain decode steps of the tokens that were accepted."""
    verify, commit = forms
    made, num_requests = Rows(device), 3
    pools = made.rand(1, num_requests + 1, 1, 2, 4)
    plain = pools.clone()
    for present, lens, accepted in steps:
        q, inputs, gates = made.delta(sum(lens), (1, 1), (4, 2))
        rows = made.state_rows(lens, [1 + request for request in present])
        assert verify(q, inputs, gates, pools[0], rows).isfinite().all()
        given = part(inputs, None), part(gates, None)
        commit(*given, pools, replayed(rows, accepted))
        for request, first, length in zip(present, rows.indptr.tolist(), accepted, strict=False):
            one = replayed(made.state_rows([1], [1 + request]), [1])
            for row in range(first, first + length):
                commit(part(given[0], (slice(None), slice(row, row + 1))), given[1], plain, one)
    return pools, plain


@pytest.mark.parametrize(
    ("forms", "num_steps"),
    [(FORMS[0], 200), (FORMS[1], 20), pytest.param(FORMS[1], 200, marks=pytest.mark.thorough)],
    ids=["reference", "kernel", "kernel, long"],
)
def test_a_state_after_many_steps_is_that_of_a_plain_decode(forms, num_steps, device):
    speculative, plain = states_after(forms, served(num_steps, 3, 3), device)
    assert torch.equal(speculative, plain)


@BOTH
def test_parts_of_wider_rows_and_slots_that_lie_apart(forms, device):
    verify, commit = forms
    made = Rows(device)
    q, inputs, gates = made.delta(4, (2, 2), (4, 3))
    wide = torch.cat([x.flatten(1) for x in (q, *vars(inputs).values())], 1)
    cuts = wide.split([8, 8, 6, 2, 2], 1)
    apart = type(inputs)(cuts[1].unflatten(1, (2, 4)), cuts[2].unflatten(1, (2, 3)), *cuts[3:])
    pools, rows = made.rand(1, 3, 2, 3, 4), made.state_rows([1, 3], [2, 1])
    spread = made.rand(1, 3, 5, 3, 4)[:, :, :2]
    spread.copy_(pools)
    expected = verify(q, inputs, gates, pools[0], rows)
    assert torch.equal(verify(cuts[0].unflatten(1, (2, 4)), apart, gates, spread[0], rows), expected)
    for kept, states in ((inputs, pools), (apart, spread)):
        commit(part(kept, None), part(gates, None), states, replayed(rows, [1, 2]))
    assert torch.equal(spread, pools)
