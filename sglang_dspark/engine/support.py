"""Which releases of SGLang this package drives, and what the others get to hear."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from sglang_dspark import __version__
from sglang_dspark.config import flag_name
from sglang_dspark.errors import EngineError

SERVED_SGLANG = ">=0.5.23,<0.5.24"
"""Releases that are served, as pyproject.toml asks for them."""

INSTALL_SGLANG = f'pip install "sglang{SERVED_SGLANG}"'
"""The remedy for a release that is not served."""

LEAST_CAPABILITY = (8, 0)
"""Of a GPU; the kernels are compiled for nothing older."""


def versions() -> dict[str, str]:
    """Versions of what a server is made of."""
    return {"sglang_dspark": __version__} | {name: version(name) for name in ("sglang", "torch")}


def installed_sglang() -> str:
    """Version of the installed SGLang.

    Raises:
        EngineError: SGLang is not installed.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise EngineError(f"sglang is not installed; run: {INSTALL_SGLANG}") from None


def release_refusal() -> str | None:
    """Return why the installed SGLang is not served, if it is installed; None where it is served."""
    try:
        check_sglang_version(installed_sglang())
    except EngineError as error:
        return str(error)
    return None


def check_sglang_version(sglang_version: str, *, untested: bool = False) -> None:
    """Refuse a release outside the range that the tests have passed in.

    Args:
        untested: whether the user wants to try all the same.

    Raises:
        EngineError: names the releases that are served, and the flag to try with.
    """
    if not untested and sglang_version not in SpecifierSet(SERVED_SGLANG):
        raise EngineError(
            f"sglang {sglang_version} is installed; sglang-dspark drives sglang {SERVED_SGLANG}: "
            f"{INSTALL_SGLANG}, or try this one with {flag_name('untested_sglang')}"
        )


def gpu_refusal(capability: tuple[int, int], *, rocm: bool) -> str | None:
    """Return why no server can run on this GPU; None where it can.

    Args:
        capability: compute capability of an NVIDIA GPU.
        rocm: whether torch was built for AMD's GPUs.
    """
    if rocm:
        return (
            "this torch was built for ROCm, on which DSPARK has not been tried; serve on an NVIDIA GPU or on a CPU, or "
            f"pass {flag_name('engine')} builtin for SGLang's own DSPARK"
        )
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {found}, and the kernels of DSPARK need {least} (A100, RTX 30) or more"
    return None
