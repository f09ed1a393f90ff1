"""Read the users' turns of files of prompts or conversations, for every command.

A row is one of these, and of conversations only the turns of the user are read: the target answers them itself.

- ``{"turns": [text, ...]}``
- ``{"messages": [{"role": "user", "content": text}, ...]}``
- ``{"conversations": [{"from": "human", "value": text}, ...]}`` (ShareGPT), or with role and content; the key may be
  ``conversation``
- ``{"prompt": text}``, or with such a list instead of the text

A text may be a list of parts ``{"type": "text", "text": text}``, and a list may be written as JSON in a cell of a
table. Of a row with several of these forms the first one that says something is read: data sets repeat the first turn
of a conversation as its prompt.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of

logger = logging.getLogger(__name__)

Turns = tuple[str, ...]
"""The user's turns of a conversation, at least one."""
Row = tuple[str, Any]
"""The place of a row, such as ``--prompts file:3``, and what it holds."""

KEYS = ("turns", "messages", "conversations", "conversation", "prompt")
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
"""Of files that hold rows; a file with another suffix is taken for JSONL or JSON."""
_USERS = ("user", "human")
_FORMS = '{"turns": [text, ...]}, {"prompt": text}, {"messages": [...]} or {"conversations": [...]}'


def read_prompts(path: Path, limit: int | None = None, shuffle_seed: int | None = None) -> list[str]:
    """Read first user turns in the order of the file, each text once: a repeated one would be measured twice.

    Args:
        limit: how many to read at most.
        shuffle_seed: if the file has more than `limit` prompts, choose among them as DeepSpec's evaluator does: they
            are shuffled with this seed, and the first ones stay.

    Raises:
        ConfigError: as :func:`read_rows` and :func:`conversations_of`.
    """
    texts = [turns[0] for turns in conversations_of(read_rows(path), str(path))]
    if shuffle_seed is not None and limit is not None and len(texts) > limit:
        random.Random(shuffle_seed).shuffle(texts)
        texts = texts[:limit]
    return list(dict.fromkeys(texts))[:limit]


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a JSONL, JSON, CSV, TSV or parquet file. A mark of byte order is passed over.

    Raises:
        ConfigError: the file or one of its lines cannot be read.
    """
    place, kind = f"--prompts {path}", path.suffix.lower()
    try:
        if kind == ".parquet":
            return _numbered(_parquet(path), place)
        text = path.read_text(encoding="utf-8-sig")
        if kind in (".csv", ".tsv"):
            return _csv(text, "\t" if kind == ".tsv" else ",", place)
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{place}: cannot be read ({error}); give a JSONL, JSON, CSV, TSV or parquet file in UTF-8"
        ) from error
    except ImportError as error:
        raise ConfigError(
            f'{place}: parquet files need pyarrow; pip install "sglang-dspark[train]", or export the rows as JSONL'
        ) from error
    if text.lstrip().startswith("["):
        return _numbered(_json(text, place), place)
    lines = [(f"{place}:{number}", line) for number, line in enumerate(lines_of(text), start=1) if line.strip()]
    return [(where, _json(line, where)) for where, line in lines]


def conversations_of(rows: Iterable[Row], source: str) -> list[Turns]:
    """Return what users said in the rows. One message in the log counts those in which they say nothing.

    Args:
        source: of the rows, for messages.

    Raises:
        ConfigError: a row has none of the forms above, or no user says anything.
    """
    found: list[Turns] = []
    silent: list[str] = []
    for where, row in rows:
        if turns := _user_turns(row, where):
            found.append(turns)
        else:
            silent.append(where)
    if not found:
        raise ConfigError(
            f"--prompts {source} is empty: no user says anything; name prompts or conversations, in rows of {_FORMS}"
        )
    if silent:
        logger.warning(
            "--prompts %s: %d of %d rows are left out, because no user says anything in them; the first is %s",
            source,
            len(silent),
            len(found) + len(silent),
            silent[0].removeprefix("--prompts "),
        )
    return found


def _user_turns(row: Any, where: str) -> Turns:
    """Return an empty tuple if no user says anything."""
    keys = [key for key in KEYS if key in row] if isinstance(row, dict) else []
    found = [turns for key in keys if (turns := _turns_under(key, row[key])) is not None]
    if not found:
        raise ConfigError(f"{where}: {str(row)[:60]!r} has no text; write {_FORMS}")
    return next(filter(None, found), ())


def _turns_under(key: str, cell: Any) -> Turns | None:
    """Return the turns that a key of a row holds; None if it has none of the forms."""
    if not cell:
        return ()
    value = _decoded(cell) if isinstance(cell, str) else cell
    if isinstance(value, list) and all(_is_message(item) for item in value):
        said = [message for message in value if _speaker(message).lower() in _USERS]
        texts = [_joined(one.get("value") if one.get("content") is None else one["content"]) for one in said]
    elif key == "turns" and isinstance(value, list):
        texts = [_joined(turn) for turn in value]
    elif key == "prompt":
        texts = [cell if isinstance(cell, str) else _joined(value)]
    else:
        return None
    return tuple(text for text in texts if text.strip()) if all(isinstance(text, str) for text in texts) else None


def _decoded(cell: str) -> Any:
    """Return the list that a cell of a table holds as JSON, or else the cell."""
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(_speaker(item), str)


def _speaker(message: dict[str, Any]) -> Any:
    return message.get("role") or message.get("from")


def _joined(content: Any) -> Any:
    """Return the text of a turn that may be null or written in parts, if all of these are text."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    return content


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


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"{where} is not JSON ({error}); write one object per line, or one array of objects"
        ) from error
