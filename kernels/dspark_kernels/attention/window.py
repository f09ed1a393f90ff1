"""Attention of a few query rows per request: over its paged context, and over the window of the rows themselves.

Both forwards of a decode step have this shape. In the draft block every row sees the whole window (Eq. 3), in the
target's verification a row sees the window up to itself. K/V of the window are handed in next to the pool, since those
of a draft block are never stored there, or are read back from it, where what is stored has been rounded. Layers of some
drafters see only the last rows of the context, or have sinks: a score for each head that only makes its weights
smaller.

Slots are read from SGLang's ``req_to_token`` table, and lengths from the device: the kernel needs no index list built
for it and no value of the host, so it can be captured in a CUDA graph.

All query heads that share a K/V head, and all rows of a request, are one tile: the context is read once per K/V head,
where a kernel that works head by head reads it once per query head. A group of heads whose tile would be too large is
shared out among programs. Few requests with long contexts would leave most of a GPU idle, so the context is split over
several programs, the last of which combines their parts (flash-decoding). The host, which launches for contexts of any
length, says how many splits there may be. How many a request uses follows from its own context: if that is short, one
program writes its rows, its other programs end at once, and there is nothing to combine.

All this depends on what is computed together, and so does rounding. Where a row must get the same bits in every batch,
a split is a fixed number of keys (``fixed_split``), and tiles depend only on heads and dtypes.

Bytes moved: 2 * kv_heads * hd * (context + rows) of K and V, and twice the queries; the floor is that over the memory
bandwidth. Where S > 1 splits are used, 8 * S bytes per query element come on top.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton

from dspark_kernels.attention.window_kernels import window_attention_kernel
from dspark_kernels.dispatch import num_processors, on_kernels


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` [n, heads, hd] with the heads of a row side by side, as kernels read them; rows may lie apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


_MIN_DOT = 16  # smallest tile side of tl.dot
_FAN = 16  # parts that are combined at a time
_MAX_SPLITS = _FAN**2
WINDOW_ROWS = 16  # of a request at most, with `fixed_split`
SPLIT_TILES = 16_384  # of queries at most, where contexts are split
_TILES_PER_SPLIT = 2  # tiles of keys below which another program costs more than it saves; the first one, thrice that
_MAX_TILE = 32_768  # bytes of a program's queries, beyond which registers and shared memory do not suffice
_FOUR_WARPS_TILE = 4096  # elements that four warps hold in their registers
_WIDE_HEAD = 256  # bytes of a head beyond which fewer keys are taken at a time
_CROWDED = 3  # programs per multiprocessor from which on small ones are faster: more of them run at once


@dataclass(frozen=True)
class PagedWindows:
    """Windows of rows over paged contexts.

    Attributes:
        req_to_token: [rows, columns] int32, slot of every position of every request; columns ``0..prefix_lens[r]-1`` of
            row ``req_pool_indices[r]`` are read, and those of the window where the pool holds that.
        req_pool_indices: [bs] int64.
        prefix_lens: [bs] int64, context length per request; 0 is allowed.
        indptr: [bs + 1] int64, first row of each request; a request without rows is allowed, and so are rows past the
            last request.
        width: bound on the rows of a request.
        sliding_window: rows that are seen of a context and its window; None for all. The window slides with its row,
            which counts as one of them: row i sees positions above ``prefix_lens + i - sliding_window``.
        from_anchor: all rows see what is seen before the first one: the last ``sliding_window`` rows of the context,
            and the window.
        translation: [slots] int64, row of the pool for each slot; None if they are the same. Only slots of what is seen
            need one.
        fixed_split: keys of a split, a multiple of those of a tile (64 at most). On a GPU, the bits of a row's output
            then depend on its query, its position and its keys and values only: not on the rows, requests and splits
            that are computed with it. Needs causal rows whose keys the pool holds, at most ``WINDOW_ROWS`` of a
            request, not seen from the anchor. Layers with a sliding window are not split. None: what is fastest.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    prefix_lens: torch.Tensor
    indptr: torch.Tensor
    width: int
    sliding_window: int | None = None
    from_anchor: bool = False
    translation: torch.Tensor | None = None
    fixed_split: int | None = None

    def first_seen(self, prefix: int) -> int:
        """Return the first position that a row of a request with such a context sees."""
        if self.sliding_window is None:
            return 0
        return max(0, prefix - self.sliding_window + (0 if self.from_anchor else 1))


def window_attention_ref(
    q: torch.Tensor,  # [N, heads, hd]
    kv: tuple[torch.Tensor, torch.Tensor] | None,  # [N, kv_heads, hd] each
    pool: tuple[torch.Tensor, torch.Tensor],  # [slots, kv_heads, hd] each
    windows: PagedWindows,
    *,
    causal: bool,
    scale: float,
    sinks: torch.Tensor | None = None,  # [heads]
    splits: int | None = None,
) -> torch.Tensor:
    """Compute the same as :func:`window_attention` in plain torch, whose rounding is its own. Syncs with the host."""
    out = torch.zeros_like(q)
    for request, (start, end) in enumerate(itertools.pairwise(windows.indptr.tolist())):
        if start == end:
            continue
        prefix, rows = int(windows.prefix_lens[request]), end - start
        first = windows.first_seen(prefix)
        stored = prefix + (rows if kv is None else 0)
        slots = windows.req_to_token[windows.req_pool_indices[request], first:stored].long()
        if windows.translation is not None:
            slots = windows.translation[slots]
        keys, values = (
            cached[slots].to(q.dtype) if x is None else torch.cat([cached[slots].to(q.dtype), x[start:end]])
            for cached, x in zip(pool, kv or (None, None), strict=True)
        )
        visible = _visible(windows, prefix, rows, causal)[:, first:].to(q.device)
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
        if sinks is not None:
            # A key and a value of zeros, whose score the mask gives.
            keys, values = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (keys, values))
            scores = sinks.to(q.dtype)[:, None, None].expand(-1, rows, 1)
            mask = torch.cat([mask.expand(len(sinks), -1, -1), scores], dim=-1)
        attended = F.scaled_dot_product_attention(
            q[start:end].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = attended[0].transpose(0, 1)
    return out


def _visible(windows: PagedWindows, prefix: int, rows: int, causal: bool) -> torch.Tensor:
    """[rows, prefix + rows] bool: what each row of a request sees."""
    own = prefix + torch.arange(rows)[:, None]
    keys = torch.arange(prefix + rows)
    visible = (keys <= own) | (not causal)
    if windows.sliding_window is None:
        return visible
    return visible & (keys > (prefix - 1 if windows.from_anchor else own) - windows.sliding_window)


@on_kernels(window_attention_ref)
def window_attention(
    q: torch.Tensor,  # [N, heads, hd]
    kv: tuple[torch.Tensor, torch.Tensor] | None,  # [N, kv_heads, hd] each
    pool: tuple[torch.Tensor, torch.Tensor],  # [slots, kv_heads, hd] each
    windows: PagedWindows,
    *,
    causal: bool,
    scale: float,
    sinks: torch.Tensor | None = None,  # [heads]
    splits: int | None = None,
) -> torch.Tensor:
    """Attend from every row to its request's context and window.

    Args:
        q, kv: rows of the windows, request by request, normalised and rotated; float32, float16 or bfloat16. Rows may
            lie apart, as they do in the output of a fused projection. None for K and V where the pool holds the windows
            too, after their contexts: rows then see what later steps will read of them.
        pool: K and V of the contexts in this layer, contiguous; any float dtype, float8_e4m3fn among them.
        windows: whose rows they are, and where the contexts lie.
        causal: a row sees the window up to itself, not all of it.
        scale: of the scores.
        sinks: one more score of each head, without a value, that ``scale`` does not touch; any float dtype.
        splits: programs that may share a context, at most 256; None = what fills the GPU, see :func:`num_splits`.
            With ``fixed_split`` as many as the longest context and its window need: with fewer, other bits come out.

    Returns:
        [N, heads, hd] in q's dtype, 0 in rows of no request; sums in float32. No host sync; safe under graph capture.

    Raises:
        ValueError: the pool rows are not contiguous, or something does not go with ``fixed_split``.
    """
    if not (pool[0].is_contiguous() and pool[1].is_contiguous()):
        raise ValueError("k_pool and v_pool must be contiguous; pass one layer of a [L, slots, kv_heads, hd] pool")
    q = with_whole_rows(q)
    k, v = (None, None) if kv is None else map(with_whole_rows, kv)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pool[0].shape[1]
    group, block_d = num_heads // num_kv_heads, _block_d(head_dim)
    head_bytes = block_d * q.element_size()
    blocks = _blocks_of_rows(windows, group, head_bytes)
    # Captured forwards have a slot for every request that might come; so many requests at least have rows.
    batch = triton.cdiv(num_rows, windows.width), num_kv_heads, num_processors(q.device)
    requests, programs = len(windows.prefix_lens), num_kv_heads * triton.cdiv(group, blocks["SHARE"])
    splits, has_parts = _splits(splits, windows, requests * programs, batch)
    crowded, is_fixed = splits == 1 and is_crowded(*batch), windows.fixed_split is not None
    tiles = _tiles_of_keys(blocks["BLOCK_M"], block_d, head_bytes, crowded=crowded, is_fixed=is_fixed)
    _check_fixed(windows, tiles["BLOCK_N"], causal=causal, is_stored=kv is None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    window_attention_kernel[requests, programs, splits](
        *(q, k, v, out),
        *((*_parts(splits, q), _arrivals(q.device)) if has_parts else (None, None, None)),
        *pool,
        *(windows.req_to_token, windows.req_pool_indices, windows.prefix_lens, windows.indptr, windows.translation),
        sinks,
        q.stride(0),
        *(0 if x is None else x.stride(0) for x in (k, v)),
        *(windows.req_to_token.stride(0), num_rows, scale),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        CAUSAL=causal,
        SLIDING_WINDOW=windows.sliding_window or 0,
        FROM_ANCHOR=windows.from_anchor,
        TILES_PER_SPLIT=_TILES_PER_SPLIT,
        FIXED_SPLIT=windows.fixed_split or 0,
        BLOCK_D=block_d,
        FAN=_FAN,
        **(blocks | tiles),
    )
    return out


def _blocks_of_rows(windows: PagedWindows, group: int, head_bytes: int) -> dict[str, int]:
    """Return the heads of a program, and its blocks: its rows times heads, its heads, and the rows of a window."""
    width = windows.width if windows.fixed_split is None else WINDOW_ROWS
    share = _heads_per_program(group, width, head_bytes)
    return {
        "SHARE": share,
        "BLOCK_M": max(_MIN_DOT, triton.next_power_of_2(width * share)),
        "BLOCK_H": triton.next_power_of_2(share),
        "BLOCK_W": max(_MIN_DOT, triton.next_power_of_2(width)),
    }


def _splits(asked: int | None, windows: PagedWindows, tiles: int, batch: tuple[int, int, int]) -> tuple[int, bool]:
    """Return how many programs share a context, and whether they leave parts."""
    if windows.fixed_split is None:
        # One where there are no counters for more.
        splits = 1 if tiles > SPLIT_TILES else num_splits(*batch) if asked is None else asked
        return splits, splits > 1
    if windows.sliding_window is not None:
        return 1, False
    if asked is None or not 1 <= asked <= _MAX_SPLITS:
        raise ValueError(f"splits={asked}; with fixed_split, pass 1 to {_MAX_SPLITS}, enough for the longest context")
    if tiles > SPLIT_TILES:
        raise ValueError(f"fixed_split takes {SPLIT_TILES} requests times programs at a time, not {tiles}; pass fewer")
    # Parts also for one split: a layer has one kernel, for the compiler may round otherwise in another one.
    return asked, True


def _check_fixed(windows: PagedWindows, tile: int, *, causal: bool, is_stored: bool) -> None:
    if windows.fixed_split is None:
        return
    if not causal or windows.from_anchor:
        raise ValueError("fixed_split needs rows that see up to themselves; pass causal=True, and from_anchor=False")
    if not is_stored:
        raise ValueError("fixed_split needs windows that the pool holds; store them, and pass kv=None")
    if windows.width > WINDOW_ROWS:
        raise ValueError(f"fixed_split takes {WINDOW_ROWS} rows per request, not {windows.width}; cut longer windows")
    if windows.fixed_split <= 0 or windows.fixed_split % tile:
        raise ValueError(f"fixed_split={windows.fixed_split}; pass a multiple of the {tile} keys of a tile")


def _parts(splits: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory for what each split has of q's rows, and [splits, N, heads] for logarithms of sums of weights."""
    rows = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
    return rows, torch.empty(rows.shape[:-1], dtype=torch.float32, device=q.device)


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Return counters of programs that have left their parts: zeros, as every launch leaves them.

    Launches follow each other on one stream. The first one on a device must not be captured.
    """
    return torch.zeros(SPLIT_TILES * (_FAN + 1), dtype=torch.int32, device=device)


def _tiles_of_keys(block_m: int, block_d: int, head_bytes: int, *, crowded: bool, is_fixed: bool) -> dict[str, int]:
    """Return the keys of a tile, the warps that compute it, and the tiles at hand or under way.

    K, V and the queries share what a program has, 99 KiB on an L4 or an RTX 4090: wider heads have fewer keys, and
    next to the largest tiles of queries, K and V of no second tile are under way. With fixed tiles a batch changes
    nothing, and those of float32 always get eight warps: 16 rows of three heads have no room in the registers of four.
    """
    keys = max(_MIN_DOT, 64 * _WIDE_HEAD // max(_WIDE_HEAD, triton.next_power_of_2(head_bytes)))
    stages = 3 if 2 * block_m * head_bytes <= _MAX_TILE else 2
    if block_m * block_d > _FOUR_WARPS_TILE or (is_fixed and head_bytes > 2 * block_d):
        return {"BLOCK_N": keys, "num_warps": 8, "num_stages": stages}
    if crowded and not is_fixed:
        return {"BLOCK_N": max(_MIN_DOT, keys // 2), "num_warps": 2, "num_stages": stages}
    return {"BLOCK_N": keys, "num_warps": 4, "num_stages": stages}


def _block_d(head_dim: int) -> int:
    return max(_MIN_DOT, triton.next_power_of_2(head_dim))


def _heads_per_program(group: int, width: int, head_bytes: int) -> int:
    """Return how many query heads of a K/V head share a tile: all, unless it were too large."""
    share = group
    while share > 1 and triton.next_power_of_2(width * share) * head_bytes > _MAX_TILE:
        share = triton.cdiv(share, 2)
    return share


def widest_window(head_dim: int, dtype: torch.dtype) -> int:
    """Return the most rows of a request that the kernel can be built for; its reference has no limit."""
    return _MAX_TILE // (_block_d(head_dim) * dtype.itemsize)


def num_splits(bs: int, num_kv_heads: int, num_processors: int) -> int:
    """Return the number of splits of the contexts that gives every multiprocessor of the GPU about two programs.

    Args:
        bs: requests of the batch.
        num_kv_heads: of one layer on this rank.
        num_processors: multiprocessors of the GPU.
    """
    return max(1, min(_MAX_SPLITS, 2 * num_processors // max(1, bs * num_kv_heads)))


def is_crowded(bs: int, num_kv_heads: int, num_processors: int) -> bool:
    """Return whether every multiprocessor has several programs; the arguments are those of :func:`num_splits`."""
    return bs * num_kv_heads >= _CROWDED * num_processors
