"""Entry point ``sglang.srt.plugins``: SGLang calls :func:`register` in main, scheduler and command-line processes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dspark.engine.scheduler import StepDriver


def register() -> None:
    """Register DSPARK with the running SGLang, or say why not.

    SGLang logs and then swallows exceptions of plugins; the user would only see "Unknown speculative algorithm name".
    So if the command line asks for DSPARK, a failure ends the process with its message instead.
    """
    from sglang_dspark.errors import DSparkError

    try:
        from sglang_dspark.engine.start import register_algorithm

        register_algorithm(_load_worker)
    except Exception as error:
        if not _dspark_selected(sys.argv):
            raise
        if isinstance(error, DSparkError):
            raise SystemExit(f"sglang-dspark cannot start: {error}") from error
        from sglang_dspark.engine.support import release_refusal

        found = f"{type(error).__name__}: {error}"
        refusal = release_refusal()  # another release may lack what is imported long before its number is looked at
        raise SystemExit(f"sglang-dspark cannot start: {f'{refusal} ({found})' if refusal else found}") from error


def _load_worker() -> type[StepDriver]:
    from sglang_dspark.worker.worker import DSparkWorker

    return DSparkWorker


def _dspark_selected(argv: list[str]) -> bool:
    """Return whether the command line asks for DSPARK, and not for SGLang's own."""
    from sglang_dspark.config import flag_name, option_text

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--speculative-algorithm", nargs="?")
    parser.add_argument(flag_name("engine"), dest="engine", nargs="?")
    given, _ = parser.parse_known_args(argv)
    algorithm = (given.speculative_algorithm or "").upper()
    if algorithm != "DSPARK":
        return algorithm == "DSPARK_PLUGIN"
    return option_text("engine", {"engine": given.engine}) != "builtin"
