"""Comparing kernels that round to 16 bits where torch does."""

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MAX_TIPPED = 0.01  # share of 16-bit elements where a float32 difference in the last place may tip a rounding


def assert_equal_but_for_rounding(kernel, reference):
    """Both round to the dtype in the same places, from float32 that may differ in its last bit.

    Triton's interpreter truncates to bfloat16 where a GPU rounds: there only the bound holds and not the share.
    """
    dtype = reference.dtype
    assert kernel.dtype == dtype
    bound = 4 * torch.finfo(dtype).eps * reference.abs().max().item()
    torch.testing.assert_close(kernel, reference, atol=bound, rtol=0.0)
    if dtype == torch.float16 or (dtype == torch.bfloat16 and kernel.is_cuda):
        assert (kernel != reference).float().mean().item() <= MAX_TIPPED
