"""Which releases of SGLang this package drives, and what the others get to hear."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from sglang_dspark import __version__
from sglang_dspark.config import flag_name
from sglang_dspark.errors import EngineError

TESTED_SGLANG = ("0.5.15.post1", "0.5.23")
"""Releases that are served, oldest first; docs/newer_sglang.md says what was tested on which."""

# Not the newest: there the same command line starts SGLang's own DSPARK.
INSTALL_SGLANG = f"pip install sglang=={TESTED_SGLANG[0]}"
"""The remedy for a release that is not served."""

LEAST_CAPABILITY = (8, 0)
"""Of a GPU; the kernels are compiled for nothing older."""

_FIRST_WITH_BUILT_IN_DSPARK = Version("0.5.16.dev0")


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


def has_built_in_dspark(sglang_version: str) -> bool:
    """Whether this SGLang has a DSPARK of its own; for those who cannot ask it, because it may not import."""
    return Version(sglang_version) >= _FIRST_WITH_BUILT_IN_DSPARK


def check_sglang_version(sglang_version: str, *, untested: bool = False) -> None:
    """Refuse a release that the tests have not passed on.

    Args:
        untested: whether the user wants to try all the same.

    Raises:
        EngineError: names the releases that are served, and the flag to try with.
    """
    if sglang_version not in TESTED_SGLANG and not untested:
        raise EngineError(
            f"sglang {sglang_version} is installed; sglang-dspark drives sglang {' and '.join(TESTED_SGLANG)}: "
            f"{INSTALL_SGLANG}, or try this one with {flag_name('untested_sglang')}"
        )


def gpu_refusal(capability: tuple[int, int], *, rocm: bool) -> str | None:
    """Why no server can run on this GPU; None where it can.

    Args:
        capability: compute capability of an NVIDIA GPU.
        rocm: whether torch was built for AMD's GPUs.
    """
    if rocm:
        return "this torch was built for ROCm, on which DSPARK has not been tried; serve on an NVIDIA GPU or on a CPU"
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        return f"this GPU has compute capability {found}, and the kernels of DSPARK need {least} (A100, RTX 30) or more"
    return None
