"""The short convolution over ragged rows, and a commit that moves windows on.

Values are compared with those of SGLang: test_stock_recurrence.py.
"""

import pytest
import torch
from dspark_kernels import causal_conv_rows, causal_conv_rows_ref, commit_conv_windows, commit_conv_windows_ref
from dspark_kernels import causal_conv_rows as module
from recurrent_rows import Rows, replayed, served

LENS, SLOTS = [3, 0, 1, 5, 2], [4, 2, -1, 1, 3]
FORMS = [(causal_conv_rows_ref, commit_conv_windows_ref), (causal_conv_rows, commit_conv_windows)]
BOTH = pytest.mark.parametrize("forms", FORMS, ids=["reference", "kernel"])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let several programs share the channels of a case that is small."""
    monkeypatch.setattr(module, "_CHANNELS_PER_PROGRAM", 16)


@BOTH
@pytest.mark.parametrize("after", [0, 3])
def test_a_track_that_is_no_row_of_the_replay_is_left(forms, after, device):
    """Before the first row a window is no new one; the third is not replayed."""
    _, commit = forms
    made = Rows(device)
    (x, *_), windows = made.conv(3, 5, layers=(1,)), made.rand(1, 3, 5, 3)
    left = windows.clone()
    commit(x, left, replayed(made.state_rows([3], [1]), [2], ([after], [2])))
    assert torch.equal(left[:, 2], windows[:, 2]) and not torch.equal(left[:, 1], windows[:, 1])


@BOTH
@pytest.mark.parametrize("window_dtype", [torch.float32, torch.float16], ids=str)
def test_several_rows_equal_as_many_decode_steps(forms, window_dtype, device):
    """Also where a decode reads what it rounded when it stored it."""
    convolve, commit = forms
    made = Rows(device)
    (x, weight, bias), windows = made.conv(6, 5), made.rand(1, 2, 5, 3, dtype=window_dtype)
    left, rows = windows.clone(), made.state_rows([6], [1])
    out = convolve(x, weight, bias, windows[0], rows)
    commit(x[None], left, replayed(rows, [6]))
    one = made.state_rows([1], [1])
    for row in range(6):
        at = x[row : row + 1]
        assert torch.equal(convolve(at, weight, bias, windows[0], one)[0], out[row])
        commit(at[None], windows, replayed(one, [1]))
    assert torch.equal(left, windows)


@BOTH
def test_windows_after_many_steps_hold_the_last_accepted_rows(forms, device):
    _, commit = forms
    made, num_requests = Rows(device), 3
    windows = made.rand(1, num_requests + 1, 2, 3)
    texts = [windows[0, 1 + request].T.tolist() for request in range(num_requests)]
    for present, lens, accepted in served(40, num_requests, 5):
        x, rows = made.rand(sum(lens), 2), made.state_rows(lens, [1 + request for request in present])
        commit(x[None], windows, replayed(rows, accepted))
        for request, first, length in zip(present, rows.indptr.tolist(), accepted, strict=False):
            texts[request] += x[first : first + length].tolist()
    for request, text in enumerate(texts):
        assert windows[0, 1 + request].T.tolist() == text[-3:]


@BOTH
def test_output_goes_where_it_is_kept(forms, device):
    """And inputs may be a part of wider rows."""
    convolve, commit = forms
    made = Rows(device)
    (x, weight, bias), windows, rows = made.conv(4, 5), made.rand(3, 5, 3), made.state_rows([1, 2], [2, 1])
    expected = convolve(x, weight, bias, windows, rows)
    wide, kept = torch.cat([x, x], 1)[:, :5], made.rand(2, 4, 7)[1, :, :5]
    assert convolve(wide, weight, bias, windows, rows, kept) is kept
    assert torch.equal(kept, expected) and not kept[3].any()
    left = [windows[None].clone() for _ in range(2)]
    for pools, inputs in zip(left, (x, wide), strict=True):
        commit(inputs[None], pools, replayed(rows, [1, 2]))
    assert torch.equal(*left)
