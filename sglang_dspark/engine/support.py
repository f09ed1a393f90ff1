"""Which SGLang this package drives, and what the others get to hear."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from sglang_dspark import __version__
from sglang_dspark.errors import EngineError

SUPPORTED_SGLANG = "0.5.15.post1"
FIRST_WITH_BUILT_IN_DSPARK = Version("0.5.16.dev0")


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
        raise EngineError(f"sglang is not installed; run: pip install sglang=={SUPPORTED_SGLANG}") from None


def has_built_in_dspark(sglang_version: str) -> bool:
    """Whether this SGLang registers a DSPARK of its own, which the plugin leaves alone."""
    return Version(sglang_version) >= FIRST_WITH_BUILT_IN_DSPARK


def check_sglang_version(sglang_version: str) -> None:
    """Refuse a release that the engine seam was not written for.

    Raises:
        EngineError: any version but ``SUPPORTED_SGLANG``.
    """
    if sglang_version != SUPPORTED_SGLANG:
        built_in = " (it has a built-in DSPARK, which stays in charge)" if has_built_in_dspark(sglang_version) else ""
        raise EngineError(
            f"sglang {sglang_version} is installed{built_in}; sglang-dspark drives sglang {SUPPORTED_SGLANG}: "
            f"pip install sglang=={SUPPORTED_SGLANG}"
        )
