"""Record the origin of a result: command, commit, versions, hardware."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sglang_dspark.files import atomic_write_text

PACKAGES = ("sglang-dspark", "sglang", "torch", "transformers", "triton")
REPOSITORY = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Return the commit, with ``-dirty`` when the measured code differs from it; ``unknown`` outside git."""
    if not (REPOSITORY / ".git").exists():  # installed, perhaps into a folder of somebody else's repository
        return "unknown"
    sha = _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD")
    return f"{sha}{'-dirty' if _changes() else ''}" if sha else "unknown"


def changes_digest() -> str:
    """Return the SHA-256 of the changes to the measured code since the commit; empty without any."""
    changes = _changes()
    return hashlib.sha256(changes.encode()).hexdigest() if changes else ""


def _changes() -> str:
    # A sweep may write its results into the repository, and texts about them change no figure.
    return _output("git", "-C", str(REPOSITORY), "diff", "HEAD", "--", ":!benchmarks/results", ":!*.md")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the figures."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu() -> str:
    """Return the CPU model and the number of logical cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def gpu() -> str:
    """Return the GPU models, separated by commas; empty without one."""
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return ", ".join(names.splitlines())


def hardware() -> dict[str, Any]:
    """Return CPU, GPU and memory of this machine."""
    return {"cpu": cpu(), "gpu": gpu(), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1)}


def command() -> str:
    """Return the command line as one would type it in the root of the repository."""
    return shlex.join(["python", *(portable(word) for word in sys.argv)])


def record() -> dict[str, Any]:
    """Return all of it, as a result file begins."""
    return {"command": command(), "commit": commit(), "versions": versions(), "hardware": hardware()}


def portable(text: str) -> str:
    """Return ``text`` without this machine's folders: paths in the repository become relative, others lose theirs."""
    if not text.startswith("/"):
        return text
    path = Path(text)
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


_PATH = re.compile(r"(?<![\w/.:~-])(?:~|\.{1,2})?(?:/[^\s/'\",:;()\[\]{}<>=]+)+/?")


def without_names(value: Any, names: Mapping[str, str]) -> Any:
    """Return JSON of which no text names a folder of this machine, or the machine itself.

    Args:
        names: texts to put in the place of others, for instance of a model's folder. Of any other absolute path only
            its last part is left.
    """
    if isinstance(value, dict):
        return {key: without_names(entry, names) for key, entry in value.items()}
    if isinstance(value, list):
        return [without_names(entry, names) for entry in value]
    if not isinstance(value, str):
        return value
    for name, instead in {**names, platform.node(): "HOST"}.items():
        value = value.replace(name, instead) if name else value
    return _PATH.sub(lambda match: Path(match[0]).name, value)


# Of flags whose value may be a secret, or name a machine, a file or a model.
_PRIVATE = re.compile("key|pass|host|addr|url|path|dir|file|name|config|endpoint|tokenizer|template|model|revision")


def shown_flag(words: Sequence[str]) -> str:
    """Return a flag and its values as a report shows it: with ``...`` in the place of what may be private."""
    flag, _, value = words[0].partition("=")
    values = [*filter(None, [value]), *words[1:]]
    if _PRIVATE.search(flag):
        return " ".join([flag, *["..." for _ in values]])
    return " ".join([flag, *[value if re.fullmatch(r"[\w.,+-]+", value) else "..." for value in values]])


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Return the name and the digest of each file that a result was made from."""
    return [{"file": path.name, "sha256": file_digest(path)} for path in paths]


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` to ``path`` in one step, so that a reader never finds half of it."""
    atomic_write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")


def _output(*words: str) -> str:
    if shutil.which(words[0]) is None:
        return ""
    result = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
