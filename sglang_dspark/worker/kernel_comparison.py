"""Runs a kernel and its reference on the same arguments, for the self-check.

Most arguments are those of the call that is looked at. Logits are made up where tokens are drawn, attention also gets
long contexts, and requests get states of their own. What a function writes is put back after each run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from dspark_kernels import (
    Dispatched,
    DraftBlock,
    DraftHeads,
    PagedWindows,
    ReplayedRows,
    RoundKeys,
    in_its_dtype,
    observed,
)

PER_REQUEST = ("commit_gated_delta", "commit_conv_windows")
"""Functions whose references go from request to request."""

_LONG = 1500  # tokens of a context that several programs of attention share
_EPS_OF_SUMS = 2.0**-17  # of float32, for sums of thousands of products in another order
_LARGE = 2**16  # sizes from there on are those of pools, which differ from start to start


class Results(NamedTuple):
    """Two results of the same thing.

    Attributes:
        found, expected: their tensors.
        eps: the unit in the last place, relative, of the coarsest numbers that they were computed from.
        requests: how many requests drew tokens, one per row of each tensor; 0 if nothing was drawn.
    """

    found: Sequence[torch.Tensor]
    expected: Sequence[torch.Tensor]
    eps: float
    requests: int = 0


class UncheckedError(Exception):
    """Two results cannot be compared."""


class Region(NamedTuple):
    """Memory that a function writes: the ``slots`` of dimension ``dim``, or all of the tensor."""

    tensor: torch.Tensor
    slots: torch.Tensor | None = None
    dim: int = 0

    def read(self) -> torch.Tensor:
        """Return a copy of it."""
        return self.tensor.clone() if self.slots is None else self.tensor.index_select(self.dim, self.slots)

    def write(self, values: torch.Tensor) -> None:
        """Write what :meth:`read` returned."""
        if self.slots is None:
            self.tensor.copy_(values)
        else:
            self.tensor.index_copy_(self.dim, self.slots, values)


def both_forms(function: Dispatched[Any, Any], given: Mapping[str, Any], attempt: int) -> Results:
    """Run kernel and reference on the same memory, which is left as it was."""
    name, given = function.kernel.__name__, dict(given)
    if name == "draft_block":
        given["base_logits"] = _made_logits(given["base_logits"], attempt)
    elif name == "accept":
        given["target_logits"] = _logits_that_accept(given["target_logits"], given["block"], given["windows"], attempt)
    elif name in PER_REQUEST:
        given["rows"] = _in_slots_of_their_own(given["rows"], _pool(given))
    written = list(_written(name, given))
    before = [region.read() for region in written]

    def result_of(form: Callable[..., Any], given: Mapping[str, Any]) -> list[torch.Tensor]:
        try:
            result = [tensor.clone() for tensor in _compared(name, form(**given), given)]
            return result + [region.read() for region in written]
        finally:
            for region, values in zip(written, before, strict=True):
                region.write(values)

    with observed(None):
        found = result_of(function.kernel, given)
        wide = given | {"heads": _with_exact_bias(given["heads"])} if name == "draft_block" else given
        try:
            expected = result_of(function.reference, wide)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # raises if no kernel runs any more
            raise UncheckedError(f"its reference raises {type(error).__name__}: {error}") from error
    floats = [tensor for tensor in (*tensors_of(given), *expected) if tensor.is_floating_point()]
    # Numbers of eight bits are exact where they are read; where they are written, their own rounding counts.
    eps = max((torch.finfo(tensor.dtype).eps for tensor in floats if tensor.element_size() > 1), default=0.0)
    eps = max(eps, _EPS_OF_SUMS)
    drawn = {"draft_block": "anchors", "accept": "prefix_lens"}.get(name)
    return Results(found, expected, eps, 0 if drawn is None else len(given[drawn]))


def _compared(name: str, result: Any, given: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield what is compared of a result."""
    if name == "draft_block" and result.distribution is not None:
        # Of requests that are not sampled, it says nothing.
        probs, sampled = result.distribution.probs(), given["rows"].sampled_index
        yield torch.zeros_like(probs).index_copy_(0, sampled, probs[sampled])
        result = replace(result, distribution=None)
    if name == "accept":  # slots of the batch without a request get any token
        is_empty = given["windows"].indptr.diff() == 0
        yield from (part.masked_fill(is_empty.view(-1, *[1] * (part.dim() - 1)), 0) for part in tensors_of(result))
        return
    yield from tensors_of(result)


def _written(name: str, given: Mapping[str, Any]) -> Iterator[Region]:
    """Yield the arguments that a function writes. Of a pool, these are the slots to which one row is written."""
    if name == "kv_inject":
        slots, rows = given["slots"].long(), given.get("rows")
        index = _once(slots if rows is None else slots[rows.kept()], least=1)  # slot 0 is padding
        yield from (Region(pool, index, 1) for pool in given["pool"])
    elif name in PER_REQUEST:
        rows = given["rows"]
        slots = [part for part in (rows.slots, rows.track_slots) if part is not None]
        yield Region(_pool(given), _once(torch.cat(slots).long(), least=0), 1)
    elif name == "hold_rows":
        yield from map(Region, tensors_of(given["held"]))
    elif name == "adjust":
        yield Region(given["logits"])
    elif name == "draft_block" and given.get("candidates") is not None:
        yield Region(given["candidates"].chains)
    yield from map(Region, tensors_of(given.get("out")))


def _pool(given: Mapping[str, Any]) -> torch.Tensor:
    """Return the pool [L, slots, ...] of recurrent layers that a commit writes."""
    pool: torch.Tensor = given["states" if "states" in given else "windows"]
    return pool


def _once(slots: torch.Tensor, *, least: int) -> torch.Tensor:
    """Return the slots from ``least`` on that occur once."""
    found, counts = slots.unique(return_counts=True)
    return found[(counts == 1) & (found >= least)]


def _made_logits(like: torch.Tensor, attempt: int) -> torch.Tensor:
    """Return logits of the same layout, in which eight tokens of a row are likely, some more than others."""
    generator = torch.Generator(like.device).manual_seed(attempt)
    shape = *like.shape[:-1], min(8, like.shape[-1])
    columns = torch.rand(shape, generator=generator, device=like.device).mul(like.shape[-1]).long()
    values = torch.rand(shape, generator=generator, device=like.device).argsort(-1) * 0.7
    logits = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return logits.fill_(-30.0).scatter_(-1, columns, values.to(like.dtype))


def _logits_that_accept(like: torch.Tensor, block: DraftBlock, windows: Any, attempt: int) -> torch.Tensor:
    """Return made-up logits in which drafts are likelier than other tokens in every second request, else about so."""
    logits, drafts = _made_logits(like, attempt), block.tokens
    slots = torch.arange(drafts.shape[1], device=like.device)
    requests = torch.arange(len(drafts), device=like.device)
    rows = windows.indptr[: len(drafts), None] + slots
    is_verified = slots < windows.verify_lens[: len(drafts), None]
    scores = (9.0 - 6.0 * (requests % 2))[:, None].expand_as(rows)
    logits[rows[is_verified], drafts[is_verified]] = scores[is_verified].to(like.dtype)
    return logits


def _with_exact_bias(heads: DraftHeads) -> DraftHeads:
    """Return heads whose bias PyTorch does not round: kernels add it in float32, whatever the weights' dtype."""
    markov = heads.markov
    if markov is None or markov.w1.dtype == torch.float32:
        return heads
    w2 = in_its_dtype(markov.w2).float()
    if (head := markov.head) is None:
        return replace(heads, markov=replace(markov, w1=markov.w1.float(), w2=w2))

    def latent(*given: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        rounded, state = head.latent(*given)
        return rounded.float(), state

    wide: Any = SimpleNamespace(initial_state=head.initial_state, latent=latent)
    return replace(heads, markov=replace(markov, w2=w2, head=wide))


def in_long_contexts(windows: PagedWindows) -> PagedWindows:
    """Return the same windows after long contexts, whose keys and values are those of the dummy requests in turn."""
    lens, table = windows.prefix_lens, windows.req_to_token
    used = table[windows.req_pool_indices, : max(1, int(lens.max()))].flatten()
    generator = torch.Generator(table.device).manual_seed(0)
    shape = len(lens), _LONG + windows.width
    index = torch.randint(len(used), shape, generator=generator, device=table.device)
    own = torch.arange(len(lens), device=lens.device, dtype=windows.req_pool_indices.dtype)
    return replace(windows, req_to_token=used[index], req_pool_indices=own, prefix_lens=torch.full_like(lens, _LONG))


def _in_slots_of_their_own(rows: ReplayedRows, pool: torch.Tensor) -> ReplayedRows:
    """Return the rows with a slot for each request: dummy requests share one."""
    if pool.shape[1] <= len(rows.slots):
        return rows
    return replace(rows, slots=torch.arange(1, len(rows.slots) + 1, dtype=rows.slots.dtype, device=rows.slots.device))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: of sequences, mappings, dataclasses and modules."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for part in _parts(value):
        yield from tensors_of(part)


def form_of(value: Any) -> Any:
    """Return what kernels may tell arguments apart by: dtypes, shapes, strides, alignment, numbers, what is None."""
    if isinstance(value, torch.Tensor):
        sizes = tuple(map(_size, (*value.shape, *value.stride())))
        return str(value.dtype), sizes, value.data_ptr() % 16 == 0
    if isinstance(value, RoundKeys):  # the seed is a number like any other
        return form_of((value.step, value.request_keys, value.positions))
    if isinstance(value, int) and not isinstance(value, bool):
        return _size(value)
    parts = list(_parts(value))
    if parts or value is None or isinstance(value, bool | float | str | torch.dtype):
        return (type(value).__name__, *(map(form_of, parts))) if parts else repr(value)
    return type(value).__name__


def _size(number: int) -> Any:
    return number if abs(number) < _LARGE else (number.bit_length(), number % 16 == 0)


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.nn.Module):
        yield from value.parameters()
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, tuple | list):
        yield from value
