"""Attention of prompts whose rows get the bits that a verification of the same rows would give them.

A prompt is cut into windows like those of a verification, and ``window_attention`` attends with a ``fixed_split``. That
reads the context once for every window and not once for all of them: it is for engines that must give a row the same
bits wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton

from dspark_kernels.attention.window import SPLIT_TILES, WINDOW_ROWS, PagedWindows, window_attention
from dspark_kernels.preparation import to_device

_LEAST_SPLIT = 512  # keys; a program of fewer costs more than it saves
_MOST_PARTS = 32  # of the longest request: captured steps hold memory for them
_PARTS_BYTES = 256 << 20  # of what the splits of a call leave to be combined


@dataclass(frozen=True)
class PromptWindows:
    """New rows of prompts, cut into windows.

    Attributes:
        windows: the windows, each a request of its own whose context is all that precedes it.
        first_rows: first row of each window, and the number of rows at the end: ``windows.indptr`` on the host.
        key_lens: keys that the last row of each window sees.
    """

    windows: PagedWindows
    first_rows: Sequence[int]
    key_lens: Sequence[int]


def cut_prompts(
    req_to_token: torch.Tensor,  # [rows, columns] int32
    req_pool_indices: torch.Tensor,  # [bs] int64
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
) -> PromptWindows:
    """Cut the new rows of every request into windows of at most ``WINDOW_ROWS`` rows.

    Args:
        req_to_token: slot of every position of every request, new rows included.
        req_pool_indices: row of each request in that table.
        prefix_lens: positions of each request before its new rows, on the host.
        extend_lens: new rows of each request, on the host; 0 is allowed.

    Returns:
        The windows, without what :func:`attend_prompts` takes for a layer. Two copies to the device and no host sync.

    Raises:
        ValueError: the lists have different lengths.
    """
    if len(prefix_lens) != len(extend_lens):
        raise ValueError(f"{len(prefix_lens)} prefix_lens for {len(extend_lens)} extend_lens; pass one per request")
    owners, prefixes, first_rows, key_lens = [], [], [0], []
    for request, (prefix, length) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        for start in range(0, length, WINDOW_ROWS):
            rows = min(WINDOW_ROWS, length - start)
            owners.append(request)
            prefixes.append(prefix + start)
            first_rows.append(first_rows[-1] + rows)
            key_lens.append(prefix + start + rows)
    device = req_to_token.device
    of_windows = to_device(torch.tensor([owners, prefixes], dtype=torch.int64), device)
    indptr = to_device(torch.tensor(first_rows), device)
    windows = PagedWindows(req_to_token, req_pool_indices[of_windows[0]], of_windows[1], indptr, WINDOW_ROWS)
    return PromptWindows(windows, first_rows, key_lens)


def fixed_split_for(longest: int) -> int:
    """Return keys of a split, a power of two, of which requests of up to ``longest`` positions have 32 or fewer."""
    return max(_LEAST_SPLIT, triton.next_power_of_2(triton.cdiv(longest, _MOST_PARTS)))


def attend_prompts(
    q: torch.Tensor,  # [N, heads, hd]
    pool: tuple[torch.Tensor, torch.Tensor],  # [slots, kv_heads, hd] each
    prompts: PromptWindows,
    *,
    scale: float,
    fixed_split: int,
    sinks: torch.Tensor | None = None,  # [heads]
    sliding_window: int | None = None,
    translation: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from every new row of the prompts to its request's positions up to itself.

    As many windows share a call as the kernel has counters for, and as leave no more than 256 MiB to be combined.

    Args:
        q: new rows of the prompts, request by request, normalised and rotated; float32, float16 or bfloat16.
        pool: K and V of this layer, contiguous, which hold the new rows too; any float dtype.
        prompts: what :func:`cut_prompts` returned.
        scale: of the scores.
        fixed_split: keys of a split, as verifications have it; see :class:`PagedWindows`.
        sinks: one more score of each head, without a value.
        sliding_window: rows that a row sees, itself among them; None for all.
        translation: [slots] int64, row of the pool for each slot; None if they are the same.

    Returns:
        [N, heads, hd] in q's dtype, 0 in rows of no prompt. No host sync.

    Raises:
        ValueError: what :func:`window_attention` raises; among it, that a context has more splits than 256.
    """
    out = q.new_zeros(q.shape)
    windows = replace(prompts.windows, sliding_window=sliding_window, translation=translation, fixed_split=fixed_split)
    for first, last, splits in _calls(prompts, fixed_split, *q.shape[1:], is_split=sliding_window is None):
        rows = slice(prompts.first_rows[first], prompts.first_rows[last])
        part = replace(
            windows,
            req_pool_indices=windows.req_pool_indices[first:last],
            prefix_lens=windows.prefix_lens[first:last],
            indptr=windows.indptr[first : last + 1] - rows.start,
        )
        out[rows] = window_attention(q[rows], None, pool, part, causal=True, scale=scale, sinks=sinks, splits=splits)
    return out


def _calls(
    prompts: PromptWindows, fixed_split: int, heads: int, head_dim: int, *, is_split: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield the first window of each call, the one after its last, and the splits of its longest context."""
    first, splits = 0, 1
    for window, keys in enumerate(prompts.key_lens):
        needed = max(splits, triton.cdiv(keys, fixed_split))
        num_rows = prompts.first_rows[window + 1] - prompts.first_rows[first]
        parts_bytes = needed * num_rows * heads * head_dim * torch.float32.itemsize
        # A window has at most as many programs as heads.
        if is_split and window > first and (parts_bytes > _PARTS_BYTES or (window + 1 - first) * heads > SPLIT_TILES):
            yield first, window, splits
            first, needed = window, triton.cdiv(keys, fixed_split)
        splits = needed
    if first < len(prompts.key_lens):
        yield first, len(prompts.key_lens), splits
