"""The fixture that poisons memory does so in every test here."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unwritten_numbers_are_nan(dtype):
    like = torch.zeros(5, dtype=dtype)
    for made in (torch.empty(5, dtype=dtype), torch.empty_like(like), like.new_empty(5), like.new_empty((2, 3))):
        assert made.isnan().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_unwritten_integers_are_no_index_and_no_length(dtype):
    values = torch.empty(5, dtype=dtype).tolist()
    assert all(value < -(2**30) or value in (0x5A, True) for value in values)
