"""What a result has to say about its making: command, commit, versions, hardware."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_dspark.files import atomic_write_text

PACKAGES = ("sglang-dspark", "sglang", "torch", "transformers", "triton")
REPOSITORY = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Commit of this repository, and ``-dirty`` when the measured code differs from it; ``unknown`` outside git."""
    if not (REPOSITORY / ".git").exists():  # installed, perhaps into a folder of somebody else's repository
        return "unknown"
    sha = _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD")
    return f"{sha}{'-dirty' if _changes() else ''}" if sha else "unknown"


def changes_digest() -> str:
    """SHA-256 of the changes to the measured code since the commit; empty without any. Tells two dirty trees apart."""
    changes = _changes()
    return hashlib.sha256(changes.encode()).hexdigest() if changes else ""


def _changes() -> str:
    # A sweep may write its results into the repository, and texts about them change no figure.
    return _output("git", "-C", str(REPOSITORY), "diff", "HEAD", "--", ":!benchmarks/results", ":!*.md")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def cpu() -> str:
    """CPU model and number of logical cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def gpu() -> str:
    """GPU models, separated by commas; empty without one."""
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return ", ".join(names.splitlines())


def hardware() -> dict[str, Any]:
    """CPU, GPU and memory of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": cpu(), "gpu": gpu(), "memory_gib": round(memory / 2**30, 1)}


def command(argv: Sequence[str] = sys.argv) -> str:
    """The command line as one would type it in the root of the repository."""
    return shlex.join(["python", *(portable(word) for word in argv)])


def record() -> dict[str, Any]:
    """All of it, as a result file begins."""
    return {"command": command(), "commit": commit(), "versions": versions(), "hardware": hardware()}


def portable(text: str) -> str:
    """``text`` without the folders of this machine: paths in the repository become relative, others keep their name."""
    if not text.startswith("/"):
        return text
    path = Path(text)
    return str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write ``document`` to ``path`` in one step, so that a reader never finds half of it."""
    atomic_write_text(path, json.dumps(document, indent=2) + "\n")


def _output(*words: str) -> str:
    if shutil.which(words[0]) is None:
        return ""
    result = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return result.stdout.strip() if result.returncode == 0 else ""
