"""Codes times scales: fp8 as Hugging Face, SGLang and Model Optimizer store it, MXFP8, and Model Optimizer's NVFP4."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from sglang_dspark.draft.quantised.modules import Parts, PartShapes

Block = tuple[int, int]
"""Rows and columns of a weight that share a scale."""


def grid(shape: Sequence[int], block: Block) -> list[int]:
    """Return the shape of the scales of a weight of ``shape``, whose last blocks may be smaller."""
    return [ceil(size / part) for size, part in zip(shape, block, strict=True)]


def times_scales(codes: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Return ``codes [out, in]`` times the scale of their block, in float32.

    Args:
        scales: float32, of the shape :func:`grid`.
    """
    rows, columns = codes.shape
    of_rows = scales.repeat_interleave(block[0], 0)[:rows]
    return codes.float() * of_rows.repeat_interleave(block[1], 1)[:, :columns]


def scales_of(parts: Parts) -> Tensor:
    """Return the scales in float32: as stored, or two to the power of a byte - 127 (E8M0), or times a scale of all."""
    stored = parts.get("weight_scale_inv", parts.get("weight_scale"))
    assert stored is not None, "Scaled.check has seen one"
    scales = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
    return scales * parts["weight_scale_2"].float() if "weight_scale_2" in parts else scales


@dataclass(frozen=True)
class Scaled:
    """Weights in float8 or float4, beside ``weight_scale_inv`` or ``weight_scale``.

    A scale belongs to the whole weight, to a row of it, or to a block. Four-bit codes also have a ``weight_scale_2``,
    the scale of the scales.

    Attributes:
        words, methods: see :class:`Storage`.
        blocks: sizes that the configuration allows.
    """

    words: str
    methods: frozenset[str]
    blocks: tuple[Block, ...] = ()

    def check(self, module: str, parts: PartShapes) -> list[str]:
        """Return what is wrong with the parts of a module."""
        missing = [] if "weight" in parts else [f"missing {module}.weight"]
        if not parts.keys() & {"weight_scale", "weight_scale_inv"}:
            missing.append(f"missing {module}.weight_scale or {module}.weight_scale_inv")
        if missing:
            return missing
        shape, scale = self.shape(parts), parts.get("weight_scale_inv", parts.get("weight_scale", ()))
        if len(shape) == 2 and self._block(shape, scale) is not None:
            return []
        sizes = " or ".join(f"{rows} x {columns}" for rows, columns in self.blocks) or "none"
        return [
            f"the scales {list(scale)} of {module}.weight {shape} are neither one nor one for each row, nor for blocks "
            f"(of this configuration: {sizes})"
        ]

    def shape(self, parts: PartShapes) -> list[int]:
        """Return the shape of the weight; two codes of four bits share a byte."""
        *rows, columns = parts["weight"] or (0,)
        return [*rows, 2 * columns if "weight_scale_2" in parts else columns]

    def dequantise(self, module: str, parts: Parts) -> Tensor:
        """Return the weight in float32."""
        codes, scales = parts["weight"], scales_of(parts)
        if "weight_scale_2" in parts:
            from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

            codes = unpack_fp4_from_uint8(codes, codes.shape[0], 2 * codes.shape[1], torch.float32)
        block = self._block(codes.shape, scales.shape)
        assert block is not None, "check has found one"
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
