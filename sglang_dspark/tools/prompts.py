"""Read the users' turns of files of prompts or conversations, for every command.

A row is one of these, and of conversations only the turns of the user are read: the target answers them itself.

- ``{"turns": [text, ...]}``
- ``{"messages": [{"role": "user", "content": text}, ...]}``
- ``{"conversations": [{"from": "human", "value": text}, ...]}`` (ShareGPT), or with role and content; the key may be
  ``conversation``, or there is none around the list
- ``{"prompt": text}``, or with such a list instead of the text

A text may be a list of parts ``{"type": "text", "text": text}``. A list may be written as text in a cell of a table, or
as an object of columns, and so may the whole file. Of a row with several of these forms the first one that says
something is read: data sets repeat the first turn of a conversation as its prompt.
"""

from __future__ import annotations

import ast
import json
import logging
import random
import re
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.tools.tables import Row, read_rows, rows_of_columns

logger = logging.getLogger(__name__)

Turns = tuple[str, ...]
"""The user's turns of a conversation, at least one."""

KEYS = ("turns", "messages", "conversations", "conversation", "prompt")
_USERS = ("user", "human")
_HALF_LETTER = re.compile("[\ud800-\udfff]")  # JSON may write one; text in UTF-8 cannot
_FORMS = '{"turns": [text, ...]}, {"prompt": text}, {"messages": [...]} or {"conversations": [...]}'


def read_prompts(path: Path, limit: int | None = None, shuffle_seed: int | None = None) -> list[str]:
    """Read first user turns in the order of the file, each text once: a repeated one would be measured twice.

    Args:
        limit: the most prompts to read.
        shuffle_seed: if the file has more than `limit` prompts, choose among them as DeepSpec's evaluator does: they
            are shuffled with this seed, and the first ones stay.

    Raises:
        ConfigError: as :func:`conversations_of`, or the file cannot be read.
    """
    texts = [turns[0] for turns in conversations_of(read_rows(path), str(path))]
    if shuffle_seed is not None and limit is not None and len(texts) > limit:
        random.Random(shuffle_seed).shuffle(texts)
        texts = texts[:limit]
    return list(dict.fromkeys(texts))[:limit]


def conversations_of(rows: Iterable[Row], source: str) -> list[Turns]:
    """Return the users' texts in the rows. One message in the log counts the rows without any.

    Args:
        source: of the rows, for messages.

    Raises:
        ConfigError: a row has none of the forms above, or no user says anything.
    """
    found: list[Turns] = []
    silent: list[str] = []
    for where, row in _unfolded(rows):
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


def _unfolded(rows: Iterable[Row]) -> Iterable[Row]:
    """Return the rows of an object of columns if the file is one, and one row of messages if the rows are these."""
    rows = iter(rows)
    first = list(islice(rows, 2))
    if len(first) == 1 and _texts_of(first[0][1]) is None:
        where, table = first[0]
        unfolded = rows_of_columns(table) or []
        if any(_is_message(row) or _texts_of(row) is not None for row in unfolded):
            first = [(f"{where}, row {number}", row) for number, row in enumerate(unfolded, start=1)]
    if not first or not _is_message(first[0][1]):
        return chain(first, rows)
    every = [*first, *rows]
    is_conversation = all(_is_message(row) for _, row in every)
    return [(every[0][0], [row for _, row in every])] if is_conversation else every


def _user_turns(row: Any, where: str) -> Turns:
    """Return an empty tuple if no user says anything."""
    texts = _texts_of(row)
    if texts is None:
        raise ConfigError(f"{where}: {str(row)[:60]!r} has no text; write {_FORMS}")
    for text in texts:
        if half := _HALF_LETTER.search(text):
            raise ConfigError(
                f"{where}: {text[:60]!r} has half a letter, {half[0]!r}, which no tokenizer reads; write the other "
                "half beside it, or leave it out"
            )
    return tuple(text for text in texts if text.strip())


def _texts_of(row: Any) -> list[str] | None:
    """Return the contents of the user's turns; None if the row has none of the forms."""
    if row is None:
        return []
    if isinstance(row, list):
        return _strings(_said_by_users(row))
    if not isinstance(row, dict):
        return None
    read = [texts for key in KEYS if key in row and (texts := _strings(_said_under(key, row[key]))) is not None]
    return next((texts for texts in read if any(text.strip() for text in texts)), read[0] if read else None)


def _strings(texts: list[Any] | None) -> list[str] | None:
    return texts if texts is not None and all(isinstance(text, str) for text in texts) else None


def _said_under(key: str, cell: Any) -> list[Any] | None:
    if not cell:
        return []
    value = _decoded(cell, by_python=key != "prompt") if isinstance(cell, str) else cell
    rows = rows_of_columns(value)
    value = value if rows is None else rows
    if (said := _said_by_users(value)) is not None:
        return said
    if key == "turns" and isinstance(value, list | tuple):
        return [_joined(turn) for turn in value]
    if key == "prompt":
        return [cell if isinstance(cell, str) else _joined(value)]
    return None


def _decoded(cell: str, *, by_python: bool) -> Any:
    """Return the list or object that a cell of a table holds as JSON or, as pandas writes it, in Python's notation."""
    for decode in (json.loads, ast.literal_eval) if by_python else (json.loads,):
        try:
            return decode(cell.strip())
        except (ValueError, SyntaxError):
            continue
    return cell


def _said_by_users(messages: Any) -> list[Any] | None:
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        return None
    users = [message for message in messages if _speaker(message).lower() in _USERS]
    return [_joined(user.get("value") if user.get("content") is None else user["content"]) for user in users]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(_speaker(item), str) and not item.keys() & set(KEYS)


def _speaker(message: dict[str, Any]) -> Any:
    return message.get("role") or message.get("from")


def _joined(content: Any) -> Any:
    """Return the text of a turn that may be null or written in parts, if all of these are text."""
    parts = rows_of_columns(content) or content
    if parts is None:
        return ""
    if isinstance(parts, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return content
