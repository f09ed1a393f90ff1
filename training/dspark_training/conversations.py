"""Read the users' turns of prompt files, of folders of them, and of data sets of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.prompts import KEYS, SUFFIXES, Row, Turns, conversations_of, read_rows


def read_conversations(source: str) -> list[Turns]:
    """Return the conversations of a file, of a folder of files, or of a data set of the hub.

    Args:
        source: a path, or the name of a data set, with ``:SPLIT`` or ``:CONFIG:SPLIT`` after it if it is not the split
            ``train`` of its only configuration.

    Raises:
        ConfigError: there is none, it cannot be read, a row is of no known form, or no user says anything.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        return conversations_of(read_rows(path) if path.exists() else _rows_of_hub(source), source)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ConfigError(
            f"--prompts {source}: cannot be read (no file ends in {', '.join(SUFFIXES)}); give another folder"
        )
    return conversations_of((row for file in files for row in read_rows(file)), source)


def _rows_of_hub(source: str) -> Iterator[Row]:
    from datasets import load_dataset

    name, *wanted = source.split(":")
    split = (wanted.pop() if wanted else "") or "train"
    try:
        rows = load_dataset(name, *wanted, split=split)
    except Exception as error:  # the library raises whatever its many sources do
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--prompts {source}: cannot be read ({reason}); give a file of prompts, a folder of them, or a data set "
            "of the hub as OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT"
        ) from error
    # Rows are read one by one, and no other columns: a data set may be larger than the memory.
    rows = rows.select_columns([name for name in rows.column_names if name in KEYS] or rows.column_names)
    return ((f"--prompts {source}, row {number}", row) for number, row in enumerate(rows, start=1))
