"""Codes times scales: fp8 as Hugging Face, SGLang and Model Optimizer store it, MXFP8, and Model Optimizer's NVFP4."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from sglang_dspark.draft.quantised.modules import Parts, PartShapes, UnfitError

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale; the last ones may be fewer."""


def grid(shape: Sequence[int], block: Block) -> list[int]:
    """Return the shape of the scales of a weight of ``shape``."""
    return [ceil(size / part) for size, part in zip(shape, block, strict=True)]


def times_scales(codes: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return ``codes [out, in]`` times the scale of their block, in float32; ``scales`` have the shape of the grid."""
    rows, columns = codes.shape
    of_rows = scales.repeat_interleave(block[0], 0)[:rows]
    return codes.float() * of_rows.repeat_interleave(block[1], 1)[:, :columns]


@dataclass
class Scaled:
    """Weights in float8 or float4, beside scales of the weight, of its rows or of blocks.

    Scales in bytes are powers of two (E8M0). Codes of four bits share a byte, and have a scale of the scales in
    ``weight_scale_2``.

    Attributes:
        words, methods: see :class:`Storage`.
        blocks: sizes that the configuration allows.
    """

    words: str
    methods: frozenset[str]
    blocks: tuple[Block, ...] = ()

    def shape(self, module: str, parts: PartShapes) -> list[int]:
        """Return the shape of the weight, or raise UnfitError."""
        scale = parts.get("weight_scale_inv", parts.get("weight_scale"))
        if "weight" not in parts or scale is None:
            raise UnfitError(f"missing {module}.weight{'_scale or weight_scale_inv' if scale is None else ''}")
        *rows, columns = parts["weight"] or (0,)
        shape = [*rows, 2 * columns if "weight_scale_2" in parts else columns]
        if len(shape) != 2 or self._block(shape, scale) is None:
            sizes = " or ".join(f"{height} x {width}" for height, width in self.blocks) or "none"
            raise UnfitError(
                f"the scales {list(scale)} of {module}.weight {shape} are neither one nor one for each row, nor for "
                f"blocks (of this configuration: {sizes})"
            )
        return shape

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight in float32."""
        codes, scales = parts["weight"], parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"]
        scales = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
        if "weight_scale_2" in parts:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

            codes = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
            scales = scales * parts["weight_scale_2"].float()
        block = self._block(codes.shape, scales.shape)
        assert block is not None, "shape() has found one"
        return times_scales(codes, scales.reshape(grid(codes.shape, block)), block)

    def _block(self, shape: Sequence[int], scale: Sequence[int]) -> Block | None:
        """Return the block that a scale belongs to, by the shape of the scales; None if no block fits."""
        rows, columns = shape
        sizes = list(scale[::2] if len(scale) == 4 else scale)  # Model Optimizer keeps dimensions of length 1
        if prod(sizes) == 1:
            return rows, columns
        if sizes in ([rows], [rows, 1]):
            return 1, columns
        return next((block for block in self.blocks if grid(shape, block) == sizes), None)
