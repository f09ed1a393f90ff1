"""SGLang's resolution of a command line as on a GPU that is not there, with DSPARK and without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from family_targets import written_target
from random_drafter import random_drafter
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args

from sglang_dspark.engine.server import speculating

_FACTS = ("sm90", "sm100", "sm100_or_sm110", "sm110", "sm120", "blackwell", "hopper_with_cuda_12_3")
GPUS: dict[str, tuple[tuple[int, int], set[str]]] = {
    "Ampere": ((8, 0), set()),
    "Ada": ((8, 9), set()),
    "Hopper": ((9, 0), {"sm90", "hopper_with_cuda_12_3"}),
    "B200": ((10, 0), {"sm100", "sm100_or_sm110", "blackwell"}),
    "RTX 50": ((12, 0), {"sm120", "blackwell"}),
}
"""Generations: compute capability, and what SGLang says of the machine."""


class Resolved(NamedTuple):
    """Holds what SGLang has decided: attention of prompts and of decoding, slots per page; and what DSPARK changed."""

    prefill: str
    decode: str
    page_size: int
    adjusted: tuple[str, ...]


@contextmanager
def machine(gpu: str) -> Iterator[None]:
    """SGLang takes the machine for one with this GPU."""
    capability, facts = GPUS[gpu]
    is_there: dict[str, Any] = {f"is_{fact}": fact in facts for fact in _FACTS}
    number = capability[0] * 10 + capability[1]
    with override_platform(
        **is_there, is_cuda=True, has_flashinfer=True, device_sm=number, device_capability=capability
    ):
        yield


class Pairs:
    """Tiny targets of families, and a drafter for all of them, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._drafter = random_drafter(folder / "drafter", "tiny")

    def resolve(self, gpu: str, architecture: str, *flags: str, with_dspark: bool = True) -> Resolved:
        """Resolve a command line for a target of a class."""
        view, server = self.view(gpu, architecture, *flags, with_dspark=with_dspark)
        return Resolved(*attention_backends_of(view), view.page_size, getattr(server, "adjusted", ()))

    def view(self, gpu: str, architecture: str, *flags: str, with_dspark: bool = True) -> tuple[Any, Any]:
        """Return everything that SGLang has decided about a command line, and the server with DSPARK."""
        target = self._folder / architecture
        if not target.exists():
            written_target(architecture, target)
        ours = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(self._drafter))
        command = ["--model-path", str(target), "--device", "cuda", *flags, *(ours if with_dspark else ())]
        with machine(gpu):
            args = prepare_server_args(command)
            args.resolve_once()
            return resolved_view(args), speculating(args)
