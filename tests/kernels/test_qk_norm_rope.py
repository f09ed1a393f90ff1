"""The elementwise kernels of a fused draft layer, norm with RoPE and SwiGLU, against their torch forms."""

import pytest
import torch
from dspark_kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_ref
from dspark_kernels.silu_mul import silu_mul, silu_mul_ref

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX_TIPPED = 0.01  # share of 16-bit elements where a float32 difference in the last place may tip a rounding


def assert_equal_but_for_rounding(kernel, reference):
    """Triton's interpreter truncates to bfloat16 where a GPU rounds: there only the bound holds and not the share."""
    assert kernel.dtype == reference.dtype
    bound = 4 * torch.finfo(reference.dtype).eps * reference.abs().max().item()
    torch.testing.assert_close(kernel, reference, atol=bound, rtol=0.0)
    if reference.dtype == torch.float16 or (reference.dtype == torch.bfloat16 and kernel.is_cuda):
        assert (kernel != reference).float().mean().item() <= MAX_TIPPED


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (7, 40), (5, 513), (3, 1536)])
def test_silu_mul_equals_the_reference(num_rows, size, dtype, device):
    generator = torch.Generator().manual_seed(0)
    wide = (4 * torch.randn(num_rows, 2 * size + 3, generator=generator)).to(dtype).to(device)
    gate_up = wide[:, : 2 * size]
    assert_equal_but_for_rounding(silu_mul(gate_up), silu_mul_ref(gate_up))


def test_silu_mul_at_the_ends_of_the_range(device):
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4]], device=device)
    out = silu_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert out.tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]
    assert silu_mul(gate[:0, :4]).shape == (0, 2)
    with pytest.raises(ValueError, match="2 \\* I"):
        silu_mul(gate)
