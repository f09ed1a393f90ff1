"""A residual with the norm behind it against the torch form."""

import pytest
import torch
from dspark_kernels import add_norm, add_norm_ref
from rounding import DTYPES, assert_equal_but_for_rounding

EPS = 1e-5


def rand(*size, seed, dtype=torch.float32, device="cpu"):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 40), (3, 513), (2, 2560)])
def test_sum_and_norm_equal_the_reference(num_rows, size, dtype, device):
    """The rows of one operand lie apart."""
    like = {"dtype": dtype, "device": device}
    hidden = rand(num_rows, size + 3, seed=0, **like)[:, :size]
    update, weight = 3 * rand(num_rows, size, seed=1, **like), rand(size, seed=2, **like)
    before = hidden.clone(), update.clone()
    found, expected = add_norm(hidden, update, weight, EPS), add_norm_ref(hidden, update, weight, EPS)
    for kernel, reference in zip(found, expected, strict=True):
        assert kernel.is_contiguous()
        assert_equal_but_for_rounding(kernel, reference)
    assert torch.equal(hidden, before[0]) and torch.equal(update, before[1])


def test_columns_that_lie_apart_and_no_rows_at_all(device):
    hidden, update, weight = rand(6, 24, seed=0), rand(6, 24, seed=1), rand(24, seed=2)
    hidden, update, weight = (x.to(device) for x in (hidden, update, weight))
    apart = update.t().contiguous().t()
    for one, other in zip(add_norm(hidden, apart, weight, EPS), add_norm(hidden, update, weight, EPS), strict=True):
        assert torch.equal(one, other)
    assert [tuple(x.shape) for x in add_norm(hidden[:0], update[:0], weight, EPS)] == [(0, 24), (0, 24)]


def test_a_row_of_zeros_stays_zero(device):
    hidden = rand(2, 24, seed=0).to(device)
    for part in add_norm(hidden, -hidden, torch.ones(24, device=device), EPS):
        assert (part == 0).all()


def test_shapes_that_do_not_fit_are_refused(device):
    hidden, weight = torch.ones(3, 24, device=device), torch.ones(24, device=device)
    for wrong in ((hidden, hidden[:2], weight), (hidden, hidden, weight[:12])):
        with pytest.raises(ValueError, match="do not fit together"):
            add_norm(*wrong, EPS)
