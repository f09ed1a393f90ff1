"""Names what of SGLang and of GPUs is served, and refuses the rest."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from sglang_dspark import __version__
from sglang_dspark.config import flag_name
from sglang_dspark.errors import EngineError

SERVED_SGLANG = ">=0.5.23,<0.5.24"
"""Releases that are served, as pyproject.toml asks for them."""

INSTALL_SGLANG = f'pip install "sglang{SERVED_SGLANG}"'
"""The remedy for a release that is not served."""

OTHER_RELEASE = f"sglang-dspark cannot serve on it; run: {INSTALL_SGLANG}"
"""The end of a message about an SGLang that the plugin cannot drive."""

MIN_CAPABILITY = (8, 0)
"""Oldest compute capability of a GPU that the kernels are compiled for."""

COMMON_NAME = "DSPARK"
"""What everybody calls the algorithm, SGLang its own DSPARK as well."""

ALGORITHM = "DSPARK_PLUGIN"
"""The name under which ours is registered with SGLang's ``--speculative-algorithm``."""

DEVICES = ("cpu", "cuda")
"""Devices that are served."""


def versions() -> dict[str, str]:
    """Return the versions of what a server is made of."""
    return {"sglang_dspark": __version__} | {name: version(name) for name in ("sglang", "torch")}


def installed_sglang() -> str:
    """Return the version of the installed SGLang.

    Raises:
        EngineError: SGLang is not installed.
    """
    try:
        return version("sglang")
    except PackageNotFoundError:
        raise EngineError(f"sglang is not installed; run: {INSTALL_SGLANG}") from None


def release_refusal() -> str | None:
    """Return why the installed SGLang is not served, or that none is installed; None if it is served."""
    try:
        check_sglang_version(installed_sglang())
    except EngineError as error:
        return str(error)
    return None


def check_sglang_version(sglang_version: str, *, untested: bool = False) -> None:
    """Refuse a release outside the range that the tests have passed in.

    Args:
        untested: whether the user wants to try it anyway.

    Raises:
        EngineError: names the releases that are served, and the flag to try with.
    """
    if not untested and sglang_version not in SpecifierSet(SERVED_SGLANG):
        raise EngineError(
            f"sglang {sglang_version} is installed, and sglang-dspark serves on sglang {SERVED_SGLANG}; run: "
            f"{INSTALL_SGLANG}, or try this one with {flag_name('untested_sglang')}"
        )


def gpu_refusal(capability: tuple[int, int], *, rocm: bool) -> str | None:
    """Return why no server can run on this GPU; None if one can.

    Args:
        capability: compute capability of an NVIDIA GPU.
        rocm: whether torch was built for AMD's GPUs.
    """
    if rocm:
        return (
            "this torch was built for ROCm, on which DSPARK has not been tried; serve on an NVIDIA GPU or on a CPU, or "
            f"pass {flag_name('engine')} builtin for SGLang's own worker"
        )
    if capability < MIN_CAPABILITY:
        found, needed = (".".join(map(str, pair)) for pair in (capability, MIN_CAPABILITY))
        return f"this GPU has compute capability {found}, and the kernels of DSPARK need {needed} or more"
    return None
