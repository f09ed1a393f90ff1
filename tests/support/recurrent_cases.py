"""Calls of the kernels of recurrent layers, see ``kernel_cases``."""

import torch
from acceptance_cases import DTYPES
from kernel_calls import case
from recurrent_rows import replayed

DELTA = {torch.float32: {"atol": 2e-6, "rtol": 2e-5}}  # float32 sums of up to 40 products, in another order
LENS, SLOTS = [3, 0, 1, 4], [4, 2, -1, 1]


def state_rows(made, index_dtype):
    """Four real requests, one without rows and one without a state, before two that are none; seven slots of states."""
    rows = made.state_rows([*LENS, 0, 0], [*SLOTS, 0, 2], index_dtype)
    made.spoilt(rows.slots, len(SLOTS))
    return rows


def replayed_rows(made):
    """Rows and tracks, whatever stands in requests that are not there."""
    tracks = [2, 1, 1, 3, 0, 0], [3, 5, 5, -1, 0, 0]
    rows = replayed(state_rows(made, torch.int32), [2, 5, 1, 99, 0, 0], tracks, torch.int32)
    for of_requests in (rows.lengths, rows.track_lengths, rows.track_slots):
        made.spoilt(of_requests, len(SLOTS))
    return rows


def states(made, *shape, layers=0, dtype=torch.float32):
    owned = {slot for slot in SLOTS if slot >= 0}
    pools = [made.pool(owned, *shape, slots=7).to(dtype) for _ in range(layers or 1)]
    return torch.stack(pools) if layers else pools[0]


def advanced(pools, before):
    """States of the requests and of their tracks; no other one has changed, to the bit."""
    others = [0, 2, 6]
    assert torch.equal(pools[:, others].view(torch.uint8), before[:, others].view(torch.uint8))
    return [pools[:, [1, 3, 4]]]


OF_DELTA = (((2, 4), (5, 3)), ((1, 3), (20, 40)), ((2, 2), (1, 1)), ((2, 4), (16, 8)))


@case(*OF_DELTA, dtypes=DTYPES, tolerance=DELTA)
def gated_delta(form, made, heads, dims):
    """Several programs share the values of a head if these are wide."""
    index_dtype = torch.int32 if made.dtype == torch.float16 else torch.int64
    q, inputs, gates = made.delta(sum(LENS) + 3, heads, dims)
    for x in (q, *vars(inputs).values()):
        made.spoilt(x, sum(LENS))
    pool = states(made, heads[1], *dims[::-1])
    before = pool.clone()
    out = form(q, inputs, gates, pool, state_rows(made, index_dtype))
    assert torch.equal(pool.view(torch.uint8), before.view(torch.uint8)) and not out[sum(LENS) :].any()
    return [out]


@case(((2, 4), (5, 3), 1), ((1, 2), (6, 35), 2), tolerance=DELTA)
def commit_gated_delta(form, made, heads, dims, layers):
    _, inputs, gates = made.delta(sum(LENS) + 2, heads, dims, (layers,))
    for x in vars(inputs).values():
        made.spoilt(x.transpose(0, 1), sum(LENS))
    pools = states(made, heads[1], *dims[::-1], layers=layers)
    before = pools.clone()
    form(inputs, gates, pools, replayed_rows(made))
    return advanced(pools, before)


@case(
    *((5, 4, True, None), (37, 4, True, torch.float32), (5, 2, False, torch.float32), (16, 3, True, torch.float16)),
    dtypes=DTYPES,
)
def causal_conv_rows(form, made, channels, width, bias, window_dtype):
    index_dtype = torch.int32 if made.dtype == torch.float16 else torch.int64
    x, weight, offsets = made.conv(sum(LENS) + 3, channels, width, bias)
    windows = states(made, channels, width - 1, dtype=window_dtype or made.dtype)
    before = windows.clone()
    out = form(made.spoilt(x, sum(LENS)), weight, offsets, windows, state_rows(made, index_dtype))
    assert torch.equal(windows.view(torch.uint8), before.view(torch.uint8)) and not out[sum(LENS) :].any()
    return [out]


@case((4, torch.float32), (2, torch.float32), (4, torch.float16))
def commit_conv_windows(form, made, width, window_dtype):
    """The taps of a window lie apart."""
    x, *_ = made.conv(sum(LENS) + 2, 21, layers=(2,))
    made.spoilt(x.transpose(0, 1), sum(LENS))
    windows = states(made, width - 1, 21, layers=2, dtype=window_dtype).mT
    before = windows.clone()
    form(x, windows, replayed_rows(made))
    return advanced(windows.mT.contiguous(), before.mT.contiguous())
