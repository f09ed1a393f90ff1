"""Writes files and folders atomically, names cached files, and splits files into lines."""

import errno
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Give a path to write to, a file or a folder, which takes the place of ``path`` when the block ends.

    What was written is on the disk before it gets its name, so a reader finds the old content or all of the new one,
    whatever happens to the process or the machine. When the block raises, what it wrote is removed. Writers of the same
    ``path`` do not meet: each has a partial file of its own. The folder of ``path`` is made if it is missing. Files
    get the permissions of any new file, whatever library wrote them.

    Raises:
        OSError: the file cannot be written, or ``path`` is a folder that holds something.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        yield partial
        for part in (*partial.rglob("*"), partial):
            if part.is_file():
                _give_usual_mode(part)
            _sync(part)
        partial.replace(path)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write a text as :func:`atomic_write` does."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


def cached_file(folder: Path, key: Any) -> Path | None:
    """Return the file of a folder in the user's home that is kept for ``key``; None for a user without a home.

    Args:
        folder: begins with ``~``.
        key: what the file is valid for, as JSON.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    try:
        return folder.expanduser() / f"{digest}.json"
    except RuntimeError:
        return None


def lines_of(text: str) -> list[str]:
    """Split a JSONL text into lines: only line feeds end one.

    A string in JSON may hold what else ends lines for ``splitlines``, such as U+2028 or U+0085.
    """
    return text.removesuffix("\n").split("\n") if text else []


def _give_usual_mode(path: Path) -> None:
    """Let others read what the process's umask lets them: safetensors makes files only for their owner."""
    ordinary = path.with_name(f".{uuid.uuid4().hex}.mode")
    ordinary.touch()
    try:
        path.chmod(stat.S_IMODE(ordinary.stat().st_mode))
    finally:
        ordinary.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not sync folders. What they hold was synced before.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
