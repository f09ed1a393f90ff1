"""Rows of files: JSONL, JSON, CSV, TSV and parquet, each row with the place that messages about it name."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of

Row = tuple[str, Any]
"""The place of a row, such as ``--prompts file:3``, and what it holds."""

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Of files that hold rows; a file with another suffix is taken for JSONL or JSON."""
_KINDS = "give a JSONL, JSON, CSV, TSV or parquet file"


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a file, which may be compressed with gzip. A mark of byte order is passed over.

    Raises:
        ConfigError: the file or one of its lines cannot be read.
    """
    place, compressed = f"--prompts {path}", path.suffix.lower() == ".gz"
    kind = (path.with_suffix("") if compressed else path).suffix.lower()
    try:
        if kind == ".parquet":
            return _numbered(_parquet(path), place)
        with (gzip.open if compressed else open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
        if kind in (".csv", ".tsv"):
            return _csv(text, "\t" if kind == ".tsv" else ",", place)
    except (OSError, ValueError, EOFError, csv.Error) as error:
        raise ConfigError(f"{place}: cannot be read ({error}); {_KINDS} in UTF-8") from error
    except ImportError as error:
        raise ConfigError(
            f'{place}: parquet files need pyarrow; pip install "sglang-dspark[train]", or export the rows as JSONL'
        ) from error
    return _json(text, place)


def rows_of_columns(table: Any) -> list[dict[str, Any]] | None:
    """Return the rows of an object of columns: lists of one length, or objects by row as pandas writes them.

    Returns:
        None if it is no such object.
    """
    if not isinstance(table, Mapping):
        return None
    columns = {name: list(cells.values()) if isinstance(cells, Mapping) else cells for name, cells in table.items()}
    if not all(isinstance(cells, list) for cells in columns.values()) or len({*map(len, columns.values())}) != 1:
        return None
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _numbered(rows: list[Any], place: str) -> list[Row]:
    return [(f"{place}, row {number}", row) for number, row in enumerate(rows, start=1)]


def _parquet(path: Path) -> list[Any]:
    from pyarrow import parquet

    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


def _csv(text: str, delimiter: str, place: str) -> list[Row]:
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a conversation may be longer than the usual limit
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    return [(f"{place}:{reader.line_num}", row) for row in reader]


def _json(text: str, place: str) -> list[Row]:
    """Return the items of one array, one object, or a value per line."""
    lines = [(f"{place}:{number}", line) for number, line in enumerate(lines_of(text), start=1) if line.strip()]
    if not lines:
        return []
    try:
        document = json.loads(text)
    except ValueError as error:
        if len(lines) > 1 and _is_json(lines[0][1]):
            return [(where, _decoded(line, where)) for where, line in lines]
        where = f"{place}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else place
        raise ConfigError(
            f"{where} is not JSON ({error}); write one object per line, or one array of objects"
        ) from error
    return _numbered(document, place) if isinstance(document, list) else [(lines[0][0], document)]


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _decoded(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {line[:60]!r}; write one object per line") from error
