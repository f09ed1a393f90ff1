"""The losses of drafter training and their gradient: the kernel against its torch form."""

import pytest
import torch
from dspark_kernels import distribution_loss, distribution_loss_ref
from pairwise import pairwise


def case(n, v, dtype, device, *, weighted):
    generator = torch.Generator().manual_seed(0)
    logits, target_logits = (3 * torch.randn(n, v, generator=generator) for _ in range(2))
    labels = torch.randint(-1, v, (n,), generator=generator)
    labels[0] = -1
    log_weight = torch.rand(v, generator=generator) if weighted else None
    row_weights = torch.rand(n, generator=generator)
    tensors = (logits.to(dtype), target_logits.to(dtype), log_weight, labels, row_weights)
    return [None if t is None else t.to(device) for t in tensors]


# Shapes at, below and above a block, and of several.
@pytest.mark.parametrize(
    ("shape", "weighted", "dtype"),
    pairwise([(3, 64), (2, 2048), (2, 2049), (1, 5000)], [True, False], [torch.float32, torch.bfloat16]),
)
def test_kernel_equals_reference(shape, weighted, dtype, device):
    n, v = shape
    arguments = case(n, v, dtype, device, weighted=weighted)
    weights = {"ce_weight": 0.3, "tv_weight": 0.9}
    expected = distribution_loss_ref(*(None if t is None else t.clone() for t in arguments), **weights)
    found = distribution_loss(*arguments, **weights)
    assert found[2].data_ptr() == arguments[0].data_ptr()
    for value, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(value, reference, atol=1e-6, rtol=2e-2 if dtype == torch.bfloat16 else 2e-5)


def test_extreme_logits_stay_finite(device):
    logits, target_logits, _, labels, row_weights = case(2, 300, torch.float32, device, weighted=False)
    logits[0, 7] = 3e4
    target_logits[1, 3] = -3e4
    labels[0] = 8
    ce, tv, grad = distribution_loss(logits, target_logits, None, labels, row_weights, ce_weight=0.1, tv_weight=0.9)
    assert all(torch.isfinite(t).all() for t in (ce, tv, grad))
    assert float(ce[0]) == pytest.approx(-torch.log(torch.tensor(1e-30)).item(), rel=1e-4)


def test_no_rows(device):
    arguments = case(1, 64, torch.float32, device, weighted=False)
    empty = [t[:0] if t is not None else None for t in arguments]
    ce, tv, grad = distribution_loss(*empty, ce_weight=0.1, tv_weight=0.9)
    assert (len(ce), len(tv), len(grad)) == (0, 0, 0)
