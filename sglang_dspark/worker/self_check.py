"""Compares what runs on this GPU with plain PyTorch before a server answers: kernels, CUDA graphs, windows of rows.

The warm-up calls every kernel in the forms that steps will launch: dtypes, heads, block, vocabulary, numbers of rows.
The check looks on. After a form has run for the first time, the kernel and its reference compute it on the same device.
Where tokens are drawn, logits are made up: between the likely tokens of a flat distribution, rounding decides.

Forms that agreed are remembered for the same GPU and software. A start checks for a few seconds, and the next start
checks what is left.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any

import dspark_kernels
import torch
import triton
from dspark_kernels import Dispatched, observed

from sglang_dspark import __version__
from sglang_dspark.errors import EngineError
from sglang_dspark.files import atomic_write_text, cached_file
from sglang_dspark.worker.kernel_comparison import (
    PER_REQUEST,
    Results,
    UncheckedError,
    both_forms,
    form_of,
    in_long_contexts,
)

logger = logging.getLogger(__name__)

CACHE = Path("~/.cache/sglang-dspark/checked")
LIMIT_S = 5.0
"""Seconds after which a start checks no further kernel."""

ATTEMPTS = 3
"""How often results may differ before it counts, with other numbers each time: a draw may lie between two roundings."""

_FEW = 20  # of so many requests, one may be drawn otherwise
_FEW_REQUESTS = 8  # references that go from request to request are slow
_MADE_OF_OTHERS = ("block_attention", "forward_block_fused")
"""Functions that only call others, which are checked themselves."""

_ULPS_OF_INPUT, _ULPS_OF_RESULT = 4.0, 2.0
_REMEDIES = {
    "block_survival": "drop survivals from --speculative-dspark-unproven",
    "hold_rows": "drop held-rows from --speculative-dspark-unproven",
    "int8_linear": "drop --speculative-dspark-draft-quantization",
    "a CUDA graph": "pass --disable-cuda-graph",
}
"""How to do without a part. Without any other part there is only SGLang's own worker."""


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
        if name in _MADE_OF_OTHERS or (name in PER_REQUEST and len(given["rows"].slots) > _FEW_REQUESTS):
            return
        form = hashlib.sha256(repr((name, form_of(given))).encode()).hexdigest()[:16]
        if form in self._seen.get(name, ()):
            return
        if form not in self._agreed:
            if self._seconds > LIMIT_S:
                self._left += 1
                return
            began = time.monotonic()
            checked = self._checked(name, lambda attempt: both_forms(function, given, attempt))
            if name == "window_attention" and len(given["windows"].prefix_lens) <= _FEW_REQUESTS:
                long = given | {"windows": in_long_contexts(given["windows"])}
                checked = checked and self._checked(name, lambda attempt: both_forms(function, long, attempt))
            self._seconds += time.monotonic() - began
            if not checked:
                return
            self._agreed.add(form)
        self._seen.setdefault(name, set()).add(form)

    def _checked(self, name: str, both: Callable[[int], Results]) -> bool:
        """Compare two results; return False, and note why, if that cannot be done."""
        try:
            compare(name, both)
        except UncheckedError as error:
            self._unchecked[name] = str(error)
            return False
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            self._unchecked[name] = "the comparison needs more memory than is free"
            return False
        return True

    def check_graph(self, both: Callable[[int], Results]) -> None:
        """Compare what a CUDA graph gave with the same functions, launched one by one.

        Raises:
            EngineError: they differ.
        """
        self._graphs += self._checked("a CUDA graph", both)


def compare(name: str, both: Callable[[int], Results]) -> None:
    """Compare results until they agree once.

    Args:
        both: computes them, for the number of an attempt.

    Raises:
        EngineError: they never agree; the message has the largest difference, and how to do without that part.
    """
    for attempt in range(ATTEMPTS):
        results = both(attempt)
        if (said := _difference(results)) is None:
            return
        if not results.requests:  # what is not drawn stays the same
            break
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
        if wrong.any() and results.requests and wrong.dim() and len(wrong) == results.requests:
            drawn_otherwise |= wrong.flatten(1).any(1).cpu() if wrong.dim() > 1 else wrong.cpu()
        elif wrong.any():
            worst = int(excess.flatten().argmax())
            numbers = found.flatten()[worst].item(), expected.flatten()[worst].item()
            return (
                f"{int(wrong.sum())} of {wrong.numel()} numbers of result {place}, {_named(found)}, differ, "
                f"the worst is {numbers[0]:.6g} and should be {numbers[1]:.6g}"
            )
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


def _named(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _place(device: torch.device) -> Path | None:
    """Return the file of this GPU and software; None for a user without a home directory."""
    about = [str(device.type), __version__, torch.__version__, triton.__version__, version("sglang")]
    about += [file.read_text(encoding="utf-8") for file in sorted(Path(dspark_kernels.__file__).parent.rglob("*.py"))]
    if device.type == "cuda":
        driver = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # noqa: SLF001
        about += [torch.cuda.get_device_name(device), str(driver)]
    return cached_file(CACHE, about)


def _read(path: Path | None) -> set[str]:
    """Return the forms that agreed at an earlier start; none if the file cannot be read."""
    if path is None:
        return set()
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return set()
    return {form for form in found if isinstance(form, str)} if isinstance(found, list) else set()
