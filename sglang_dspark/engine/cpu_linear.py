"""Compute the linear layers of a target and its drafter on a CPU in the way that is fastest there for so many rows.

A decode step reads every weight once, for one row or for all rows of a verification, so more rows should cost little.
What PyTorch chooses can be far from that: on some CPUs MKL, which it calls for float32, takes twice as long for 2 rows
as for one. oneDNN, which PyTorch brings as well, is faster there, and faster still if it may lay out a copy of the
weights for itself. A CPU without instructions for 16 bits takes as long for each further row as for the first one:
there the copy has float32. Which way is best differs by CPU, dtype and number of rows, so a server times them when it
starts.

A sum's last bits depend on its order, which most ways choose by the number of rows. One that does not gives a row the
same bits in every batch: it computes all numbers of rows if that costs next to nothing, or if the operator asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cache, partial
from itertools import accumulate, groupby
from statistics import mean, median
from time import perf_counter
from typing import NamedTuple, TypeGuard

import psutil
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from torch import nn
from torch.nn.functional import linear, pad

from sglang_dspark.engine.agreement import Agreement
from sglang_dspark.engine.sglang_types import LinearLayer, ModelRunner
from sglang_dspark.engine.target import text_model

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
"""Numbers of rows that are timed. Others take the way of the next larger one, and more those of the last."""

LEAST_ROWS = (1, 2, 4)
"""Fewer rows may be computed as so many: a few ways give only single rows other bits, and take no longer for some."""

COMPARED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 16, 17, 24, 32, 33, 64, 96, 256, 600)
"""Numbers of rows whose bits are compared, as far as :data:`_PRODUCTS` allows."""

_PRODUCTS = 1 << 31
"""About so many products of two numbers are computed to time a number of rows, or to compare those of a shape."""

LEAST_BYTES = 32 << 20
"""Weights of less in all stay in the caches of a CPU, where there is nothing to gain."""

_TIMED_BYTES = 64 << 20
"""Of the weights so much is timed: more than most caches hold, and read in a moment."""

_ROUNDS = 3
_SECONDS = 0.2
"""Ways take turns at least so often, and so long: other programs spoil single turns."""

_GAIN = 0.95
"""A way replaces a simpler one if it takes at most this part of its time."""

_COST_OF_SAME_BITS = 1.03
"""A way with the same bits for all numbers of rows may take so much longer without being asked for, on average."""

ENCODERS = ("visual", "vision", "audio")
"""Parts of the names of modules that do not read text."""

_SHARE_OF_MEMORY = 1 / 16
"""Copies are made if those of all ranks and replicas take at most this part of the machine's memory."""


class Way(StrEnum):
    """Name the ways to compute a product, the simplest one first."""

    PYTORCH = "PyTorch's choice"
    ONEDNN = "oneDNN"
    COPY = "oneDNN with a copy of the weights"


Layer = LinearLayer | nn.Linear
"""A layer of a target, or of a drafter."""


class Ways(NamedTuple):
    """How numbers of rows are computed.

    Attributes:
        by_rows: of 0, 1, 2, ... rows; of more, the last.
        same_bits: whether the bits of a row do not depend on how many are computed together.
        least_rows: fewer rows are padded to as many.
    """

    by_rows: list[Way]
    same_bits: bool
    least_rows: int = 1


_UNCHANGED = Ways([Way.PYTORCH], same_bits=False)


class LinearLayers:
    """Compute the linear layers of one target and its drafter, LM heads included, that are not quantised.

    Attributes:
        layers: the target's and the drafter's.
        ways: of numbers of rows.
    """

    def __init__(self, layers: Sequence[Layer], ways: Ways) -> None:
        self.layers, self.ways = frozenset(layers), ways
        self._copies = dict.fromkeys(layers, torch.empty(0)) if Way.COPY in ways.by_rows else {}
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Renew the copies of weights, which have changed; layers that share a weight share its copy."""
        self._copies = dict.fromkeys(self._copies, torch.empty(0))  # the old ones go before new ones are made
        copies = {place: copy_for_onednn(weight) for place, weight in _distinct(self._copies).items()}
        self._copies = {layer: copies[_place(layer.weight)] for layer in self._copies}

    def apply(self, layer: Layer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return [..., out] ``x @ layer.weight.T + bias`` of x [..., in] and bias [out]."""
        rows = x.numel() // x.shape[-1]
        if 0 < rows < self.ways.least_rows:
            padded = pad(x.reshape(rows, -1), (0, 0, 0, self.ways.least_rows - rows))
            return self.apply(layer, padded, bias)[:rows].view(*x.shape[:-1], -1)
        way = self.ways.by_rows[min(rows, len(self.ways.by_rows) - 1)]
        if way is Way.PYTORCH or x.dtype != layer.weight.dtype:
            return linear(x, layer.weight, bias)
        return onednn_linear(x, self._copies[layer] if way is Way.COPY else layer.weight, bias)

    def forward(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] what a layer of the drafter makes of x [..., in]."""
        return self.apply(layer, x, layer.bias)


class LinearMethod(UnquantizedLinearMethod):
    """Have :class:`LinearLayers` compute a layer of SGLang's."""

    def __init__(self, layers: LinearLayers) -> None:
        self._layers = layers

    def apply(self, layer: LinearLayer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._layers.apply(layer, x, bias)


class HeadMethod(UnquantizedEmbeddingMethod):
    """Have :class:`LinearLayers` compute an LM head of SGLang's, which asks only classes that it does not know."""

    def __init__(self, layers: LinearLayers) -> None:
        self._layers = layers

    def apply(self, layer: LinearLayer, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self._layers.apply(layer, x.to(layer.weight.dtype), bias)


def replace_linear(
    runner: ModelRunner, drafter: Sequence[nn.Linear], agreement: Agreement, *, same_bits: bool
) -> LinearLayers | None:
    """Have linear layers computed in the fastest ways; None if PyTorch's choices are, or if there is little to gain.

    All ranks call it, and take rank 0's ways: one product in two ways would differ in its last bits.

    Args:
        drafter: its layers, which are computed as the target's are: their dtype is the same.
        same_bits: whether only one way shall do whose bits do not depend on the number of rows, if there is one.
    """
    methods = _methods(runner)
    layers: list[Layer] = [*methods, *drafter]
    weights = list(_distinct(layers).values())
    enough = bool(weights) and (same_bits or sum(weight.nbytes for weight in weights) >= LEAST_BYTES)
    ways = agreement.share(_choose(runner, weights, same_bits=same_bits) if enough else _UNCHANGED)
    if ways == _UNCHANGED:
        return None
    found = LinearLayers(layers, ways)
    for layer, method in methods.items():
        layer.quant_method = method(found)
    for drafting in drafter:
        drafting.forward = partial(found.forward, drafting)  # type: ignore[method-assign]
    return found


def _place(weight: torch.Tensor) -> tuple[int, torch.Size]:
    """Return what no other weight has."""
    return weight.data_ptr(), weight.shape


def _distinct(layers: Iterable[Layer]) -> dict[tuple[int, torch.Size], torch.Tensor]:
    """Return the weights of layers by their places: a drafter may have the target's LM head."""
    return {_place(layer.weight): layer.weight for layer in layers}


def _choose(runner: ModelRunner, weights: Sequence[torch.Tensor], *, same_bits: bool) -> Ways:
    """Return the fastest ways, without copies if these would take too much memory, and log them."""
    begin, size, args = perf_counter(), sum(weight.nbytes for weight in weights), runner.server_args
    copied = sum(weight.numel() for weight in weights) * (dtype_of_copies(runner.dtype) or runner.dtype).itemsize
    copied *= args.tp_size * args.dp_size  # ranks and replicas, as if all of them were on this machine
    may_copy = copied <= psutil.virtual_memory().total * _SHARE_OF_MEMORY
    ways = fastest_ways(weights, may_copy=may_copy, same_bits=same_bits)
    taken = perf_counter() - begin
    logger.info("DSPARK: linear layers on this CPU: %s; chosen in %.1f s", _described(ways, size), taken)
    return ways


def _methods(runner: ModelRunner) -> dict[LinearLayer, type[LinearMethod | HeadMethod]]:
    """Return the linear layers of a target that SGLang hands to PyTorch, and what replaces their method.

    What encodes pictures and sounds is left out: it sees hundreds of rows at once.
    """
    model, dtype = text_model(runner), runner.dtype
    found: dict[LinearLayer, type[LinearMethod | HeadMethod]] = {
        layer: LinearMethod
        for name, layer in model.named_modules()
        if _is_computed_by(layer, UnquantizedLinearMethod, dtype) and not any(part in name for part in ENCODERS)
    }
    head = getattr(model, "lm_head", None)  # the embedding, if its weights are tied
    in_its_dtype = not getattr(getattr(model, "logits_processor", None), "use_fp32_lm_head", False)
    if _is_computed_by(head, UnquantizedEmbeddingMethod, dtype) and in_its_dtype:
        found[head] = HeadMethod
    return found


def _is_computed_by(layer: object, method: type, dtype: torch.dtype) -> TypeGuard[LinearLayer]:
    """Return whether SGLang's method hands the weight as it is to PyTorch: a kernel package for CPUs packs it.

    The convolutions of gated delta nets are such layers by their class, but their weights have three dimensions.
    """
    if type(getattr(layer, "quant_method", None)) is not method:
        return False
    weight: torch.Tensor = layer.weight  # type: ignore[attr-defined]
    packed = getattr(layer, "use_intel_amx_backend", False)
    return weight.dim() == 2 and weight.dtype == dtype and not packed


@torch.no_grad()
def fastest_ways(weights: Sequence[torch.Tensor], *, may_copy: bool, same_bits: bool) -> Ways:
    """Return the fastest ways to multiply by weights [out, in].

    Args:
        may_copy: whether there is memory for copies.
        same_bits: one way for all numbers of rows, with the same bits, if there is one, whatever it costs; the same one
            at every start. Otherwise such a way is taken if it costs little.
    """
    if same_bits:
        for way in reversed(forms_of(weights[:1], may_copy=may_copy)):
            if (least := _least_rows(weights, way)) is not None:
                return Ways([way], same_bits=True, least_rows=least)
    timed: list[torch.Tensor] = []
    for weight in weights:
        if sum(other.nbytes for other in timed) >= _TIMED_BYTES:
            break
        timed.append(weight.detach())
    forms = forms_of(timed, may_copy=may_copy)
    seconds = {rows: median_seconds(_part_of(forms, rows), rows) for rows in ROWS}

    def cost(way: Way, least: int) -> float:
        return mean(seconds[max(rows, least)][way] / min(seconds[rows].values()) for rows in ROWS)

    for way in sorted(forms, key=lambda way: cost(way, 1)):
        least = _least_rows(weights, way) if cost(way, 1) <= _COST_OF_SAME_BITS else None
        if least is not None and cost(way, least) <= _COST_OF_SAME_BITS:
            return Ways([way], same_bits=True, least_rows=least)
    chosen = {rows: _simple_and_fast(seconds[rows]) for rows in ROWS}
    by_rows = [chosen[next(timed_rows for timed_rows in ROWS if timed_rows >= rows)] for rows in range(ROWS[-1] + 1)]
    return _UNCHANGED if set(by_rows) == {Way.PYTORCH} else Ways(by_rows, same_bits=False)


def _part_of(forms: dict[Way, Sequence[torch.Tensor]], rows: int) -> dict[Way, Sequence[torch.Tensor]]:
    """Return the first weights: many rows take their time also where weights stay in the caches."""
    sizes = list(accumulate(weight.numel() * rows for weight in forms[Way.PYTORCH]))
    part = 1 + sum(size <= _PRODUCTS for size in sizes[:-1])
    return {way: stored[:part] for way, stored in forms.items()}


def _least_rows(weights: Sequence[torch.Tensor], way: Way) -> int | None:
    """Return from how many rows on each has the same bits, however many are computed together; None if from none."""
    shapes = {weight.shape for weight in weights}
    tried = [_least_rows_of(out, width, weights[0].dtype, way) for out, width in shapes]
    return max(least for least in tried if least is not None) if None not in tried else None


def _least_rows_of(out: int, width: int, dtype: torch.dtype, way: Way) -> int | None:
    most = max(COMPARED_ROWS[6], _PRODUCTS // (out * width))
    numbers = [rows for rows in COMPARED_ROWS if rows <= most]
    x, weight = _cancelling(numbers[-1], out, width, dtype)
    product, stored = (linear, weight) if way is Way.PYTORCH else (onednn_linear, weight)
    if way is Way.COPY:
        stored = copy_for_onednn(weight)
    differ = [
        rows
        for bias in (None, weight[:, -1].contiguous())
        for whole in [product(x, stored, bias)]
        for rows in numbers
        for place in (slice(rows), slice(len(x) - rows, None))
        if not torch.equal(product(x[place], stored, bias), whole[place])
    ]
    return next((least for least in LEAST_ROWS if least > max(differ, default=0)), None)


def _cancelling(rows: int, out: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, width] and a weight [out, width] of which little is left when large products are summed.

    Then any other order of sums changes most results. In 16 bits it would change only one in thousands of ordinary
    ones, whose last bits are cut off.
    """
    generator, half = torch.Generator().manual_seed(0), (width - max(1, width // 64)) // 2
    place = torch.randperm(2 * half, generator=generator)

    def randn(num: int, columns: int) -> torch.Tensor:
        return torch.randn(num, columns, generator=generator)

    large, left = randn(rows, half), randn(rows, width - 2 * half) / 32
    x = torch.cat([torch.cat([large, large], dim=1)[:, place], left], dim=1).to(dtype)
    block = min(out, 256)
    large, left = randn(block, half), randn(block, width - 2 * half) / 512
    weight = torch.cat([torch.cat([large, -large], dim=1)[:, place], left], dim=1).to(dtype)
    return x, weight.repeat(-(-out // block), 1)[:out].contiguous()


def forms_of(weights: Sequence[torch.Tensor], *, may_copy: bool) -> dict[Way, Sequence[torch.Tensor]]:
    """Return what each way that this CPU has for their dtype reads of weights [out, in]."""
    forms, dtype = {Way.PYTORCH: weights}, weights[0].dtype
    computed = dtype_of_copies(dtype)
    if computed == dtype:
        forms[Way.ONEDNN] = weights
    if computed is not None and may_copy:
        forms[Way.COPY] = [copy_for_onednn(weight) for weight in weights]
    return forms


@cache
def dtype_of_copies(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which oneDNN computes layers of this one here; None if it does not."""
    tried = (dtype, torch.float32) if dtype.itemsize == 2 else (dtype,)
    for candidate in tried:
        with suppress(RuntimeError):  # this CPU has no instructions for it
            onednn_linear(torch.zeros(1, 8, dtype=candidate), torch.zeros(8, 8, dtype=candidate), None)
            return candidate
    return None


def median_seconds(forms: dict[Way, Sequence[torch.Tensor]], rows: int) -> dict[Way, float]:
    """Return the median time of each way to multiply so many rows by all weights once; the ways take turns."""
    weights = forms[Way.PYTORCH]
    inputs = [weight.new_ones(rows, weight.shape[1]) for weight in weights]
    seconds: dict[Way, list[float]] = {way: [] for way in forms}
    rounds, end = 0, perf_counter() + _SECONDS
    while rounds < _ROUNDS or perf_counter() < end:
        rounds += 1
        for way, stored in forms.items():
            product, begin = linear if way is Way.PYTORCH else onednn_linear, perf_counter()
            for x, weight in zip(inputs, stored, strict=True):
                product(x, weight, None)
            seconds[way].append(perf_counter() - begin)
    return {way: median(taken) for way, taken in seconds.items()}


def _simple_and_fast(seconds: dict[Way, float]) -> Way:
    """Return the fastest way, or a simpler one that takes hardly longer."""
    best = Way.PYTORCH
    for way, taken in seconds.items():
        best = way if taken <= _GAIN * seconds[best] else best
    return best


def onednn_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return [..., out] ``x @ weight.T + bias`` in the dtype of x, computed in that of the weight.

    Args:
        weight: [out, in], as it is or from :func:`copy_for_onednn`.
        bias: [out], in the dtype of x.
    """
    given = None if bias is None else bias.to(weight.dtype)
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x.to(weight.dtype), weight, given, "none", [], "")
    return product.to(x.dtype)


def copy_for_onednn(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy of a weight [out, in] in the layout and dtype that oneDNN likes best for a few rows."""
    rows = 8  # for which oneDNN chooses the layout
    copied = weight.detach().to(dtype_of_copies(weight.dtype))
    copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(copied, rows)
    return copy


def _described(ways: Ways, size: int) -> str:
    """Return which numbers of rows are computed in which way."""
    weights = f"{size / 2**20:.0f} MiB of weights"
    if ways.same_bits:
        padded = "" if ways.least_rows == 1 else f", of which there are at least {ways.least_rows}"
        return f"{ways.by_rows[0]} with the same bits for all numbers of rows{padded}; {weights}"
    spans = [(way, list(rows)) for way, rows in groupby(range(1, len(ways.by_rows)), ways.by_rows.__getitem__)]
    return f"{', '.join(f'{way} for {rows[0]} to {rows[-1]} rows' for way, rows in spans)}; {weights}"
