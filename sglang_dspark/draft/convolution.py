"""Dynamic convolution along the slots of a block, before and behind a sublayer of the backbone (DFlash 2).

With x the rows of a block, G channels to a group and K taps, ``y_j = sum_t (B[t] + D_j[t]) * x_{j - t}`` for t < K,
where rows before the block are 0, ``B [K, d]`` is a weight, and ``D_j [K, d / G]``, alike for all channels of a group,
is a projection of the sublayer's input. Both sides have kernels of their own, from one projection.
"""

from collections.abc import Callable

import torch
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
        taps = self.base_kernel.shape[1]
        before, behind = self.kernel_projection(rows).unflatten(-1, (2, taps, self.groups)).unbind(1)
        return self._convolved(sublayer(self._convolved(rows, before, 0, width)), behind, 1, width)

    def _convolved(self, rows: Tensor, dynamic: Tensor, side: int, width: int) -> Tensor:
        """Convolve ``rows [T, d]`` by the kernels of one side, their dynamic part ``[T, taps, groups]``."""
        kernels = self.base_kernel[side].unflatten(-1, (self.groups, -1)) + dynamic[..., None]
        kernels, x = (part.unflatten(0, (-1, width)) for part in (kernels, rows.unflatten(-1, (self.groups, -1))))
        convolved = kernels[:, :, 0] * x
        for tap in range(1, min(kernels.shape[2], width)):
            convolved[:, tap:] += kernels[:, tap:, tap] * x[:, :-tap]
        return convolved.flatten(0, 1).flatten(1)


def around(convolution: BlockConvolution | None, sublayer: Sublayer, rows: Tensor, width: int) -> Tensor:
    """Return what the sublayer makes of ``rows [T, d]``, between convolutions if it has them."""
    return sublayer(rows) if convolution is None else convolution.around(sublayer, rows, width)
