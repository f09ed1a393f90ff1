"""SwiGLU's activation against its torch form."""

import pytest
import torch
from dspark_kernels import silu_mul, silu_mul_ref
from rounding import DTYPES, assert_equal_but_for_rounding


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
