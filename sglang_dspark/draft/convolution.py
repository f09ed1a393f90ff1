"""Dynamic convolutions along the slots of a block, before and behind a sublayer of the backbone (DFlash 2).

Both have base kernels of their own, and what each row adds to these comes from one projection of the sublayer's input.
"""

from collections.abc import Callable

import torch
from dspark_kernels import block_convolution
from torch import Tensor, nn

from sglang_dspark.draft.config import DraftConfig

Sublayer = Callable[[Tensor], Tensor]
"""``[T, d] -> [T, d]``, an attention or an MLP."""


class BlockConvolution(nn.Module):
    """The two convolutions of one sublayer; parameter names are those of DFlash 2."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        taps, d = config.conv_kernel_size, config.hidden_size
        self.groups = d // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, d))
        self.kernel_projection = nn.Linear(d, 2 * taps * self.groups, bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0  # which changes nothing, but for the projection's part

    def around(self, sublayer: Sublayer, rows: Tensor, width: int) -> Tensor:
        """Return what the sublayer makes of ``rows [T, d]``, whose blocks have ``width`` rows each."""
        shape = (2, self.base_kernel.shape[1], self.groups)
        before, behind = self.kernel_projection(rows).unflatten(-1, shape).unbind(1)
        convolve = block_convolution.reference if torch.is_grad_enabled() else block_convolution
        convolved = convolve(rows, self.base_kernel[0], before, width)
        return convolve(sublayer(convolved), self.base_kernel[1], behind, width)


def around(convolution: BlockConvolution | None, sublayer: Sublayer, rows: Tensor, width: int) -> Tensor:
    """Return what the sublayer makes of ``rows [T, d]``, between convolutions if it has them."""
    return sublayer(rows) if convolution is None else convolution.around(sublayer, rows, width)
