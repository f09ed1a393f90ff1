"""Rows of files: JSONL, JSON and parquet, each row with the place that messages about it name."""

import json
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of

Row = tuple[str, Any]
"""The place of a row, such as ``--prompts file:3``, and what it holds."""

SUFFIXES = (".jsonl", ".json", ".parquet")
"""Of files that hold rows; a file with another suffix is taken for JSONL or JSON."""


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file. A mark of byte order is passed over.

    Raises:
        ConfigError: the file or one of its lines cannot be read.
    """
    place = f"--prompts {path}"
    try:
        if path.suffix.lower() == ".parquet":
            return _numbered(_parquet(path), place)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: cannot be read ({error}); give a JSONL, JSON or parquet file in UTF-8") from error
    except ImportError as error:
        raise ConfigError(
            f'{place}: parquet files need pyarrow; pip install "sglang-dspark[train]", or export the rows as JSONL'
        ) from error
    return _json(text, place)


def _numbered(rows: list[Any], place: str) -> list[Row]:
    return [(f"{place}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _parquet(path: Path) -> list[Any]:
    from pyarrow import parquet

    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


def _json(text: str, place: str) -> list[Row]:
    """Return the items of one array, one object, or a value per line."""
    try:
        document = json.loads(text)
    except ValueError:
        lines = enumerate(lines_of(text), start=1)
        return [_decoded(line, f"{place}:{number}") for number, line in lines if line.strip()]
    return _numbered(document, place) if isinstance(document, list) else [(f"{place}:1", document)]


def _decoded(line: str, where: str) -> Row:
    try:
        return where, json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON: {line[:60]!r}; write one object per line, or one array of objects"
        ) from error
