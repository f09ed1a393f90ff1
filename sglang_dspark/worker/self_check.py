"""Compares what runs on this GPU with plain PyTorch before a server answers: kernels, CUDA graphs, windows of rows.

The warm-up calls every kernel in the forms that steps will launch: dtypes, heads, block, vocabulary, numbers of rows.
The check looks on. Before a form runs for the first time, the kernel and its reference compute it on the same device.
Where tokens are drawn, logits are made up: between the likely tokens of a flat distribution, rounding decides.

Forms that agreed are remembered for the same GPU and software. A start checks for a few seconds, and the next start
checks what is left.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dspark_kernels import Dispatched, DraftBlock, RoundKeys, observed

from sglang_dspark import __version__
from sglang_dspark.errors import EngineError
from sglang_dspark.files import atomic_write_text

logger = logging.getLogger(__name__)

CACHE = Path("~/.cache/sglang-dspark/checked")
LIMIT_S = 5.0
"""Seconds after which a start checks no further kernel."""

ATTEMPTS = 3
"""How often results may differ before it counts, with other numbers each time: a draw may lie between two roundings."""

_FEW = 20  # of so many requests, one may be drawn otherwise
_ULPS_OF_INPUT, _ULPS_OF_RESULT = 4.0, 2.0
_EPS_OF_SUMS = 2.0**-17  # of float32, for sums of thousands of products in another order
_LARGE = 2**16  # sizes from there on are those of pools, which differ from start to start
_REMEDIES = {
    "block_survival": "drop survivals from --speculative-dspark-unproven",
    "hold_rows": "drop held-rows from --speculative-dspark-unproven",
    "int8_linear": "drop --speculative-dspark-draft-quantization",
    "a CUDA graph": "pass --disable-cuda-graph",
}
"""How to do without a part. Without any other part there is only SGLang's own worker."""


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


class SelfCheck:
    """What a rank of a server has compared.

    Args:
        device: of the server.
    """

    def __init__(self, device: torch.device) -> None:
        self._path = _place(device)
        self._agreed = _read(self._path)
        self._before = len(self._agreed)
        self._seen: dict[str, set[str]] = {}
        self._unchecked: dict[str, str] = {}
        self._graphs, self._left, self._seconds = 0, 0, 0.0

    def describe(self) -> dict[str, Any]:
        """Return as JSON what agreed, now or at an earlier start, and what was not checked."""
        return {
            "kernels": len(self._seen),
            "forms": sum(map(len, self._seen.values())),
            "graphs": self._graphs,
            "left_for_next_start": self._left,
            "unchecked": dict(sorted(self._unchecked.items())),
            "seconds": round(self._seconds, 2),
        }

    def looking_on(self) -> AbstractContextManager[None]:
        """Check the kernels that are called inside the block."""
        return observed(self.look)

    def finish(self) -> None:
        """Remember which forms agreed, and log what was checked."""
        new = len(self._agreed) - self._before
        if self._path is not None and new:
            try:
                atomic_write_text(self._path, json.dumps(sorted(self._agreed)))
            except OSError as error:
                logger.warning("DSPARK: the next start checks the same kernels again: %s", error)
        found = self.describe()
        logger.info(
            "DSPARK: %d kernels agree with PyTorch in %d forms, %d of them new; %d CUDA graphs agree with eager steps "
            "(%.1f s)",
            *(found["kernels"], found["forms"], new, found["graphs"], self._seconds),
        )
        if self._left:
            logger.warning("DSPARK: the next start checks the forms of %d more calls of kernels", self._left)
        for name, reason in self._unchecked.items():
            logger.warning("DSPARK: %s cannot be checked in every form: %s", name, reason)

    def look(self, function: Dispatched[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check a call of a kernel unless its form has been checked.

        Raises:
            EngineError: kernel and reference differ.
        """
        name, given = function.kernel.__name__, signature(function.kernel).bind(*args, **kwargs).arguments
        form = hashlib.sha256(repr((name, form_of(given))).encode()).hexdigest()[:16]
        if form in self._seen.get(name, ()):
            return
        if form not in self._agreed:
            if self._seconds > LIMIT_S:
                self._left += 1
                return
            began = time.monotonic()
            try:
                compare(name, lambda attempt: _both_forms(function, given, attempt))
            except _UncheckedError as error:
                self._unchecked[name] = str(error)
                return
            finally:
                self._seconds += time.monotonic() - began
            self._agreed.add(form)
        self._seen.setdefault(name, set()).add(form)

    def check_graph(self, both: Callable[[int], "Results"]) -> None:
        """Compare what a CUDA graph gave with the same functions, launched one by one.

        Raises:
            EngineError: they differ.
        """
        began = time.monotonic()
        compare("a CUDA graph", both)
        self._graphs += 1
        self._seconds += time.monotonic() - began


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


def compare(name: str, both: Callable[[int], Results]) -> None:
    """Compare results until they agree once.

    Args:
        both: computes them, for the number of an attempt.

    Raises:
        EngineError: they never agree; the message has the largest difference, and how to do without that part.
    """
    for attempt in range(ATTEMPTS):
        said = _difference(both(attempt))
        if said is None:
            return
    remedy = _REMEDIES.get(name, "pass --speculative-dspark-engine builtin to decode with SGLang's own worker")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "this device"
    raise EngineError(
        f"the self-check found a fault in {name} on {device}: {said}; {remedy}, and please report this with the flags "
        "of the server"
    )


def _difference(results: Results) -> str | None:
    """Say by how much two results differ; None if they agree."""
    drawn_otherwise = torch.zeros(results.requests, dtype=torch.bool)
    for place, (found, expected) in enumerate(zip(results.found, results.expected, strict=True)):
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return f"result {place} is {_named(found)} and should be {_named(expected)}"
        wrong, excess = _wrong(found, expected, results.eps)
        if wrong.any() and results.requests and len(wrong) == results.requests:
            drawn_otherwise |= wrong.flatten(1).any(1).cpu() if wrong.dim() > 1 else wrong.cpu()
        elif wrong.any():
            return _said(place, found, expected, wrong, excess)
    number = int(drawn_otherwise.sum())
    if number > results.requests // _FEW:
        return f"{number} of {results.requests} requests have other tokens"
    return None


def _wrong(found: torch.Tensor, expected: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where two tensors differ by more than rounding, and by how much more."""
    if not found.is_floating_point():
        wrong = found != expected
        return wrong, wrong.float()
    known, other = expected.float(), found.float()
    # Sums round by the size of what is summed, which the largest number of a row has.
    finite = known.nan_to_num(0.0, 0.0, 0.0).abs()
    size = finite.amax(-1, keepdim=True) if known.dim() and known.numel() else finite
    bound = _ULPS_OF_INPUT * eps * size + _ULPS_OF_RESULT * torch.finfo(found.dtype).eps * finite
    excess = (other - known).abs() - bound
    same = (other == known) | (other.isnan() & known.isnan())
    return ~same & ~(excess <= 0), torch.where(same, 0.0, excess).nan_to_num(torch.inf)


def _said(place: int, found: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, excess: torch.Tensor) -> str:
    worst = int(excess.flatten().argmax())
    numbers = found.flatten()[worst].item(), expected.flatten()[worst].item()
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers of result {place}, {_named(found)}, differ, "
        f"the worst is {numbers[0]:.6g} and should be {numbers[1]:.6g}"
    )


def _named(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class _UncheckedError(Exception):
    """A form cannot be checked."""


def _both_forms(function: Dispatched[Any, Any], given: Mapping[str, Any], attempt: int) -> Results:
    """Run kernel and reference on the same memory, which is left as it was."""
    name, given = function.kernel.__name__, dict(given)
    if name == "draft_block":
        given["base_logits"] = _made_logits(given["base_logits"], attempt)
    elif name == "accept":
        given["target_logits"] = _logits_that_accept(given["target_logits"], given["block"], given["windows"], attempt)
    written = list(_written(name, given))
    before = [region.read() for region in written]

    def result_of(form: Callable[..., Any]) -> list[torch.Tensor]:
        result = [tensor.clone() for tensor in _compared(name, form(**given), given)]
        result += [region.read() for region in written]
        for region, values in zip(written, before, strict=True):
            region.write(values)
        return result

    with observed(None):
        found = result_of(function.kernel)
        try:
            expected = result_of(function.reference)
        except torch.OutOfMemoryError:
            raise _UncheckedError("the reference needs more memory than is free") from None
        except Exception as error:
            raise _UncheckedError(f"its reference raises {type(error).__name__}: {error}") from error
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
        probs = torch.zeros_like(result.distribution.probs())
        sampled = given["rows"].sampled_index
        probs[sampled] = result.distribution.probs()[sampled]
        yield probs
        result = DraftBlock(result.tokens, result.confidence_logits, None, result.copied, result.chains)
    yield from tensors_of(result)


def _written(name: str, given: Mapping[str, Any]) -> Iterator[Region]:
    """Yield the arguments that a function writes. Of a pool, these are the slots to which one row is written."""
    if name == "kv_inject":
        slots, rows = given["slots"].long(), given.get("rows")
        index = _once(slots if rows is None else slots[rows.kept()], least=1)  # slot 0 is padding
        yield from (Region(pool, index, 1) for pool in given["pool"])
    elif name in ("commit_gated_delta", "commit_conv_windows"):
        rows = given["rows"]
        slots = [part for part in (rows.slots, rows.track_slots) if part is not None]
        yield Region(given["states" if "states" in given else "windows"], _once(torch.cat(slots).long(), least=0), 1)
    elif name == "hold_rows":
        yield from map(Region, tensors_of(given["held"]))
    elif name == "adjust":
        yield Region(given["logits"])
    yield from map(Region, tensors_of(given.get("out")))


def _once(slots: torch.Tensor, *, least: int) -> torch.Tensor:
    """Return the slots from ``least`` on that occur once."""
    found, counts = slots.unique(return_counts=True)
    return found[(counts == 1) & (found >= least)]


def _made_logits(like: torch.Tensor, attempt: int) -> torch.Tensor:
    """Return logits of the same shape, in which eight tokens of a row are likely, some more than others."""
    generator = torch.Generator(like.device).manual_seed(attempt)
    shape = *like.shape[:-1], min(8, like.shape[-1])
    columns = torch.rand(shape, generator=generator, device=like.device).mul(like.shape[-1]).long()
    values = torch.rand(shape, generator=generator, device=like.device).argsort(-1) * 0.7
    return torch.full_like(like, -30.0).scatter_(-1, columns, values.to(like.dtype))


def _logits_that_accept(like: torch.Tensor, block: DraftBlock, windows: Any, attempt: int) -> torch.Tensor:
    """Return made-up logits in which drafts are about as likely as other tokens."""
    logits, drafts = _made_logits(like, attempt), block.tokens
    slots = torch.arange(drafts.shape[1], device=like.device)
    rows = windows.indptr[: len(drafts), None] + slots
    is_verified = slots < windows.verify_lens[: len(drafts), None]
    logits[rows[is_verified], drafts[is_verified]] = 3.0
    return logits


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


def _place(device: torch.device) -> Path | None:
    """Return the file of this GPU and software; None for a user without a home directory."""
    about = [str(device.type), __version__, torch.__version__, *map(version, ("sglang", "triton"))]
    if device.type == "cuda":
        driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # noqa: SLF001
        about += [torch.cuda.get_device_name(device), str(driver)]
    digest = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
    try:
        return CACHE.expanduser() / f"{digest}.json"
    except RuntimeError:
        return None


def _read(path: Path | None) -> set[str]:
    """Return the forms that agreed at an earlier start; none if the file cannot be read."""
    if path is None:
        return set()
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return set()
    return {form for form in found if isinstance(form, str)} if isinstance(found, list) else set()
