"""Norms with RoPE of a fused draft layer, against the torch form."""

import pytest
import torch
from dspark_kernels import qk_norm_rope, qk_norm_rope_ref
from rounding import DTYPES, assert_equal_but_for_rounding

EPS = 1e-5


SHAPES = [
    pytest.param((1, 1, 1, 24), id="T1-h1-kv1-d24"),
    pytest.param((7, 9, 3, 64), id="T7-h9-kv3-d64"),
    pytest.param((5, 6, 6, 24), id="T5-h6-kv6-d24"),
    pytest.param((33, 8, 2, 128), id="T33-h8-kv2-d128"),
    pytest.param((3, 4, 1, 2), id="T3-h4-kv1-d2"),
]


def rope_case(shape, dtype, device):
    """Arguments of the kernel; q and k are columns of wider matrices, as a fused projection returns them."""
    num_rows, num_heads, num_kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def rand(*size):
        return torch.randn(*size, generator=generator).to(dtype).to(device)

    q = rand(num_rows, num_heads + 1, head_dim)[:, 1:]
    k = rand(num_rows, 2 * num_kv_heads, head_dim)[:, :num_kv_heads]
    inv_freq = 1.0 / 1e6 ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    positions = torch.randint(0, 2000, (num_rows,), generator=generator)
    return [q, k, rand(head_dim), rand(head_dim), EPS, inv_freq.to(device), positions.to(device)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_norm_and_rope_equal_the_reference(shape, dtype, device):
    case = rope_case(shape, dtype, device)
    before = case[0].clone(), case[1].clone()
    for kernel, reference in zip(qk_norm_rope(*case), qk_norm_rope_ref(*case), strict=True):
        assert kernel.is_contiguous()
        assert_equal_but_for_rounding(kernel, reference)
    assert torch.equal(case[0], before[0]) and torch.equal(case[1], before[1])


def test_heads_that_lie_apart_and_no_rows_at_all(device):
    q, k, *rest = rope_case((6, 4, 2, 64), torch.float32, device)
    apart = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(qk_norm_rope(apart, k, *rest)[0], qk_norm_rope(q, k, *rest)[0])
    empty = qk_norm_rope(q[:0], k[:0], *rest[:-1], rest[-1][:0])
    assert [tuple(x.shape) for x in empty] == [(0, 4, 64), (0, 2, 64)]


def test_shapes_that_do_not_fit_are_refused(device):
    q, k, *rest = rope_case((3, 4, 2, 24), torch.float32, device)
    for wrong in ([q[:2], k, *rest], [q, k[..., :12], *rest], [q, k, rest[0][:12], *rest[1:]]):
        with pytest.raises(ValueError, match="do not fit together"):
            qk_norm_rope(*wrong)
    with pytest.raises(ValueError, match="positions \\[3\\]"):
        qk_norm_rope(q, k, *rest[:-1], rest[-1][:2])
