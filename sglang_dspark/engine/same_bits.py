"""Says whether a request's tokens and log-probabilities are the same bits on a CPU whatever else the server computes.

They are if every part of the target gives a row the same bits in every batch. Norms and the sampler do. Attention in
its tiles, activations, and one way of computing linear layers are tried when a server starts: PyTorch promises none.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from dspark_kernels import VisibleKeys, attend_groups, tile_contexts
from sglang.srt.layers import activation
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.radix_attention import RadixAttention
from torch import nn

from sglang_dspark.engine.cpu_linear import ENCODERS, LinearLayers
from sglang_dspark.engine.sglang_types import ModelRunner
from sglang_dspark.engine.target import sliding_window, text_model
from sglang_dspark.engine.verify import encodes_prompts
from sglang_dspark.errors import ConfigError

_MOST_RANKS = 2  # a sum of two does not depend on its order
_TRIED_ROWS = 1100
_TRIED_SPANS = (
    *((0, 1), (3, 9), (62, 66), (100, 101), (120, 160), (300, 316), (510, 514), (1023, 1025), (1099, 1100)),
    # In 16 bits another order of sums changes few results, so many have to be compared.
    *((first, first + 1) for first in range(11, _TRIED_ROWS, 17)),
)
"""Positions of a prompt that are computed one by one, and together."""

_TRIED_NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 33, 64, 257)
"""Of rows of activations."""

_TOGETHER = 2
"""Times that they are computed together."""


class Form(NamedTuple):
    """What attention depends on besides keys and queries.

    Attributes:
        heads, kv_heads, head_dim: of this rank.
        sliding_window: the most keys that a row sees; None for all of them.
        dtype: of queries.
    """

    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None
    dtype: torch.dtype


def same_bits(runner: ModelRunner, layers: LinearLayers | None, *, asked: bool) -> bool:
    """Return whether the bits of a text are the same in every batch.

    Args:
        layers: of the target that are ours; None if SGLang computes all of them.
        asked: whether the operator passes ``--enable-deterministic-inference``.

    Raises:
        ConfigError: they are asked for, and something of the server does not have them.
    """
    reason = _why_not(runner, layers)
    if asked and reason is not None:
        raise ConfigError(f"DSPARK cannot run with --enable-deterministic-inference=True: {reason}; drop the flag")
    return reason is None


def _why_not(runner: ModelRunner, layers: LinearLayers | None) -> str | None:
    """Return what may give a row other bits in another batch."""
    if layers is None or not layers.ways.same_bits:
        return "on this CPU no way to compute linear layers gives a row the same bits in every batch"
    if not encodes_prompts(runner):
        return "recurrent layers sum a prompt in another order than drafts"
    args = runner.server_args
    if args.tp_size > _MOST_RANKS or args.enable_dp_attention:
        return f"with more than {_MOST_RANKS} ranks the order of a row's sums depends on how many rows there are"
    if args.enable_lora:
        return "an adapter is computed for all of its rows together"
    if (other := _computed_otherwise(runner, layers)) is not None:
        return f"SGLang computes {other}, in a way that may depend on the number of rows"
    if not all(activation_keeps_bits(*found, runner.dtype) for found in _activations(runner, layers)):
        return "with this number of threads PyTorch gives a row's activations other bits in other batches"
    if not all(map(attention_keeps_bits, set(_forms(runner)))):
        return "on this CPU PyTorch's attention gives a row other bits in other batches"
    return None


def _computed_otherwise(runner: ModelRunner, layers: LinearLayers) -> str | None:
    """Return the first part of a target with weights that is not one of these layers; encoders are left out."""
    model = text_model(runner)
    for name, module in model.named_modules():
        is_other = isinstance(module, LinearBase | nn.Linear) and module not in layers.layers
        if isinstance(module, FusedMoE) or (is_other and not any(part in name for part in ENCODERS)):
            return name
    return None if getattr(model, "lm_head", None) in layers.layers else "lm_head"


def _forms(runner: ModelRunner) -> Iterator[Form]:
    for layer in text_model(runner).modules():
        if isinstance(layer, RadixAttention):
            heads = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
            yield Form(*heads, sliding_window(layer), runner.dtype)


def _activations(runner: ModelRunner, layers: LinearLayers) -> Iterator[tuple[nn.Module, int]]:
    """Yield activations of a target, one of each class, with each width that they may have."""
    model = text_model(runner)
    of_a_class = {type(module): module for module in model.modules() if type(module).__module__ == activation.__name__}
    # Those that multiply two halves take an even width only. The layers of PyTorch's class are the drafter's.
    of_target = (layer for layer in layers.layers if layer is not model.lm_head and not isinstance(layer, nn.Linear))
    widths = {layer.weight.shape[0] // 2 * 2 for layer in of_target}
    yield from itertools.product(of_a_class.values(), widths)


def activation_keeps_bits(function: nn.Module, width: int, dtype: torch.dtype) -> bool:
    """Return whether rows [rows, width] have the same bits on their own and in a prompt.

    Vectors of a thread's share end with single numbers, which PyTorch may compute otherwise.
    """
    x = torch.randn(_TRIED_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = function(x)
    return all(
        torch.equal(function(x[place]), whole[place])
        for rows in _TRIED_NUMBERS
        for place in (slice(rows), slice(_TRIED_ROWS - rows, None))
    )


def attention_keeps_bits(form: Form) -> bool:
    """Return whether rows of a prompt have the same bits on their own and in the whole prompt."""
    generator = torch.Generator().manual_seed(0)
    queries, k_pool, v_pool = (
        torch.randn(_TRIED_ROWS, heads, form.head_dim, generator=generator).to(form.dtype)
        for heads in (form.heads, form.kv_heads, form.kv_heads)
    )
    table, visible = torch.arange(_TRIED_ROWS)[None], VisibleKeys(form.sliding_window)

    def attended(*spans: tuple[int, int]) -> torch.Tensor:
        layout = tile_contexts(
            *(table, [0] * len(spans), [last for _, last in spans], [last - first for first, last in spans], visible),
            heads_per_kv=form.heads // form.kv_heads,
            dtype=form.dtype,
        )
        return attend_groups(_cut(queries, spans), k_pool, v_pool, layout, form.head_dim**-0.5)

    whole = attended((0, _TRIED_ROWS))
    tried = (*((span,) for span in _TRIED_SPANS), _TRIED_SPANS * _TOGETHER)
    return all(torch.equal(attended(*spans), _cut(whole, spans)) for spans in tried)


def _cut(rows: torch.Tensor, spans: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.cat([rows[first:last] for first, last in spans])
