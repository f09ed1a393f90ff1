"""Do the kernels compile for GPUs that are not here, and do they fit on them?

    python benchmarks/kernels/compile_for.py
    python benchmarks/kernels/compile_for.py --capability 89 --output RESULTS/compiled.json

Every launch of ``cases_*.py`` is compiled down to machine code for each compute capability, and nothing is
run. That needs no GPU: Triton's compiler and assembler come with its wheel. What they say of registers, of stack (where
registers do not suffice) and of shared memory is printed; a kernel that wants more shared memory than a block of that
GPU can have fails here as it would there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
import triton
from cases import Case, all_cases
from dspark_kernels import kernels_anywhere
from dspark_kernels.attention import window
from dspark_kernels.drafting import layers, walk
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sglang_dspark.tools import provenance

# Shared memory that a block can ask for, in bytes (CUDA programming guide, technical specifications by capability).
SHARED_BYTES = {
    80: 166_912,  # A100
    86: 101_376,  # A10, A40, RTX 3090
    89: 101_376,  # L4, L40S, RTX 4090
    90: 232_448,  # H100, H200
    100: 232_448,  # B200
    120: 101_376,  # RTX 5090, RTX PRO 6000
}
_PROCESSORS = 132  # of an H200: which forms the cases take
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Compiled:
    """One form of a kernel.

    Attributes:
        kernel: name of the function.
        capability: compute capability, e.g. 90.
        cases: that launch it.
        warps: per program.
        registers: per thread.
        stack_bytes: per thread: values that found no register.
        shared_bytes: per program.
    """

    kernel: str
    capability: int
    cases: list[str]
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """Return whether a block of that GPU can have so much shared memory."""
        return self.shared_bytes <= SHARED_BYTES[self.capability]


class _AbsentGpu:
    """A Triton driver with as much as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _compiling_only(
    capability: int, first_forms: dict[str, CompiledKernel] | None
) -> Iterator[list[tuple[str, CompiledKernel]]]:
    """Launches within compile their kernels and end there, for tensors without memory too.

    Args:
        first_forms: of each kernel, the one form that is compiled; None compiles them all.
    """
    found: list[tuple[str, CompiledKernel]] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> CompiledKernel:
        kernel = first_forms.get(self.__name__) if first_forms is not None else None
        if kernel is None:
            kernel = launch(self, *args, grid=grid, warmup=True, **options)
            if first_forms is not None:
                first_forms[self.__name__] = kernel
        found.append((self.__name__, kernel))
        return kernel

    driver.set_active(_AbsentGpu(capability))
    room = SHARED_BYTES[capability]
    with (
        patch.object(JITFunction, "run", compile_only),
        patch.object(walk, "shared_bytes", lambda device: room),
        patch.object(window, "num_processors", lambda device: _PROCESSORS),
        patch.object(layers, "num_processors", lambda device: _PROCESSORS),
        kernels_anywhere(),
    ):
        yield found


def compile_cases(cases: list[Case], capability: int, *, first_forms: bool) -> list[Compiled]:
    """Compile every form of every kernel that the cases launch, or only the first one of each kernel."""
    by_form: dict[tuple[str, str], tuple[CompiledKernel, list[str]]] = {}
    firsts: dict[str, CompiledKernel] | None = {} if first_forms else None
    for case in cases:
        if case.capability > capability:
            continue
        with _compiling_only(capability, firsts) as found:
            case.run()
        for name, kernel in found:
            _, users = by_form.setdefault((name, kernel.hash), (kernel, []))
            if case.name not in users:
                users.append(case.name)
    return [
        Compiled(name, capability, users, kernel.metadata.num_warps, *_usage(kernel), kernel.metadata.shared)
        for (name, _), (kernel, users) in by_form.items()
    ]


def _usage(kernel: CompiledKernel) -> tuple[int, int]:
    """Registers and bytes of stack per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert usage is not None, text
    return int(usage[1]), int(usage[2])


@click.command(help=__doc__)
@click.option(
    "--capability",
    "capabilities",
    multiple=True,
    type=click.Choice([str(number) for number in SHARED_BYTES]),
    help="Compute capability times ten, e.g. 90. Default: all of them.",
)
@click.option("--only", default="", help="Folders of kernels, separated by commas; all by default.")
@click.option("--first-forms", is_flag=True, help="Compile only the first form of every kernel.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(capabilities: tuple[str, ...], only: str, *, first_forms: bool, output: Path | None) -> None:
    """Run the command line; see the module."""
    with torch.inference_mode():
        cases = list(all_cases(torch.device("meta"), only))
        kernels = [
            kernel
            for number in capabilities or SHARED_BYTES
            for kernel in compile_cases(cases, int(number), first_forms=first_forms)
        ]
    for k in kernels:
        figures = f"{k.warps} warps, {k.registers} registers, {k.stack_bytes} bytes of stack, {k.shared_bytes} shared"
        click.echo(f"sm_{k.capability} {k.kernel}: {figures}")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        provenance.write_json(output, {**provenance.record(), "kernels": [asdict(kernel) for kernel in kernels]})
    if too_large := sorted({f"{k.kernel} on sm_{k.capability}" for k in kernels if not k.fits}):
        raise click.ClickException(f"more shared memory than there is: {', '.join(too_large)}")


if __name__ == "__main__":
    main()
