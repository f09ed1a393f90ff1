"""Reads the users' turns of files of prompts or conversations: JSONL, JSON and parquet.

A row is one of these, and of conversations only the turns of the user are read: the target answers them itself.

- ``{"turns": [text, ...]}``
- ``{"messages": [{"role": "user", "content": text}, ...]}``
- ``{"conversations": [{"from": "human", "value": text}, ...]}`` (ShareGPT), or with role and content; the key may be
  ``conversation``
- ``{"prompt": text}``, or with such a list instead of the text

A text may be a list of parts ``{"type": "text", "text": text}``. Of a row with several of these forms the first one is
read that says something: data sets repeat the first turn of a conversation as its prompt. What assistants say is read
where answers are counted.

Chats that were cut within a letter have half of a surrogate pair, which JSON can hold, and tokenizers and UTF-8 cannot.
It is read as U+FFFD, and one message in the log counts the rows.
"""

import json
import logging
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of

logger = logging.getLogger(__name__)

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
            from pyarrow import parquet

            return _numbered(parquet.read_table(path).to_pylist(), place)
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


Turns = tuple[str, ...]
"""The user's turns of a conversation, at least one."""

KEYS = ("turns", "messages", "conversations", "conversation", "prompt")
_USERS = ("user", "human")
_ASSISTANTS = ("assistant", "gpt", "model", "chatgpt", "bot")
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


def read_answers(path: Path) -> list[str]:
    """Read what assistants say in the conversations of a file, in its order."""
    said = [(where, tuple(_texts_of(row, _ASSISTANTS) or ())) for where, row in read_rows(path)]
    return [text for texts in _whole(said, str(path)) for text in texts if text.strip()]


def conversations_of(rows: Iterable[Row], source: str) -> list[Turns]:
    """Return the users' texts in the rows. One message in the log counts the rows without any.

    Args:
        source: of the rows, for messages.

    Raises:
        ConfigError: a row has none of the forms above, or no user says anything.
    """
    found: list[tuple[str, Turns]] = []
    silent: list[str] = []
    for where, row in rows:
        texts = _texts_of(row, _USERS)
        if texts is None:
            raise ConfigError(f"{where}: {str(row)[:60]!r} has no text; write {_FORMS}")
        if turns := tuple(text for text in texts if text.strip()):
            found.append((where, turns))
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
    return _whole(found, source)


def _whole(said: Sequence[tuple[str, Turns]], source: str) -> list[Turns]:
    """Return the texts of the rows, without halves of surrogate pairs."""
    whole = [
        tuple(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace") for text in texts)
        for _, texts in said
    ]
    if torn := [where for (where, texts), read in zip(said, whole, strict=True) if read != texts]:
        logger.warning(
            "--prompts %s: in %d of %d rows a text has half of a surrogate pair, which is read as U+FFFD; the first is "
            "%s",
            source,
            len(torn),
            len(said),
            torn[0].removeprefix("--prompts "),
        )
    return whole


def _texts_of(row: Any, speakers: Sequence[str]) -> list[str] | None:
    """Return the contents of the turns of these speakers; None if the row has none of the forms."""
    if not isinstance(row, dict):
        return None
    read = [texts for key in KEYS if key in row and (texts := _said_under(key, row[key], speakers)) is not None]
    return next((texts for texts in read if any(text.strip() for text in texts)), read[0] if read else None)


def _said_under(key: str, value: Any, speakers: Sequence[str]) -> list[str] | None:
    if not value:
        return []
    if isinstance(value, list) and all(isinstance(item, dict) and isinstance(_speaker(item), str) for item in value):
        said = [message for message in value if _speaker(message).lower() in speakers]
        contents = [one.get("value") if one.get("content") is None else one["content"] for one in said]
    elif speakers is not _USERS:
        return []
    elif key == "turns" and isinstance(value, list):
        contents = value
    elif key == "prompt":
        contents = [value]
    else:
        return None
    texts = [_joined(content) for content in contents]
    return texts if all(isinstance(text, str) for text in texts) else None


def _speaker(message: dict[str, Any]) -> Any:
    return message.get("role") or message.get("from")


def _joined(content: Any) -> Any:
    """Return the text of a turn that may be null or written in parts, if all of these are text."""
    if content is None:
        return ""
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content
