"""What users said in prompt files, in data sets of conversations, and in those of the Hugging Face hub.

A row is one of these, and of conversations only the turns of the user are read: the target answers them itself.

- ``{"turns": [text, ...]}``
- ``{"messages": [{"role": "user", "content": text}, ...]}``
- ``{"conversations": [{"from": "human", "value": text}, ...]}`` (ShareGPT), or with role and content; the key
  may be ``conversation``
- ``{"prompt": text}``

A text may be a list of parts ``{"type": "text", "text": text}``. Of a row with several of these forms the first one is
read: data sets repeat the first turn of a conversation as its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError
from sglang_dspark.files import lines_of

Turns = tuple[str, ...]
"""The user's turns of a conversation, at least one."""

_SUFFIXES = (".json", ".jsonl", ".parquet")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_USERS = ("user", "human")
_FORMS = '{"turns": [text, ...]}, {"prompt": text}, {"messages": [...]} or {"conversations": [...]}'


def read_conversations(source: str) -> list[Turns]:
    """The conversations of a file (JSONL, JSON or parquet), of all such files in a folder, or of a data set of the hub.

    Rows in which no user says anything are left out.

    Args:
        source: a path, or the name of a data set, with ``:SPLIT`` or ``:CONFIG:SPLIT`` behind it where it is
            not the split ``train`` of its only configuration.

    Raises:
        ConfigError: there is none, it cannot be read, a row is of no known form, or no row is left.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        if not files:
            raise ConfigError(f"--prompts {source}: the folder has no {', '.join(_SUFFIXES)} file; name one that has")
        rows: Iterator[tuple[str, Any]] = chain.from_iterable(map(_rows_of_file, files))
    else:
        rows = _rows_of_file(path) if path.exists() else _rows_of_hub(source)
    found = [turns for where, row in rows if (turns := _user_turns(row, where))]
    if not found:
        raise ConfigError(f"--prompts {source} is empty; name prompts or conversations, in rows of {_FORMS}")
    return found


def _rows_of_file(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows, each with where it stands."""
    where = f"--prompts {path}"
    if path.suffix == ".parquet":
        yield from _numbered(where, _parquet_rows(path))
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}; pass a JSONL file of prompts") from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from _numbered(where, _parsed(text, where))
        return
    for number, line in enumerate(lines_of(text), start=1):
        if line.strip():
            yield f"{where}:{number}", _parsed(line, f"{where}:{number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {text[:60]!r}; write one object per line") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    if find_spec("pyarrow") is None:
        raise ConfigError(
            f"--prompts {path}: parquet is read by pyarrow, which is not installed; pip install pyarrow, or give JSONL"
        )
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            known = [name for name in ("turns", "prompt", *_CONVERSATIONS) if name in file.schema_arrow.names]
            for batch in file.iter_batches(columns=known):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"--prompts {path}: {error}; pass an intact parquet file") from error


def _rows_of_hub(source: str) -> Iterator[tuple[str, Any]]:
    name, *wanted = source.split(":")
    split = (wanted.pop() if wanted else "") or "train"
    if len(wanted) > 1:
        raise ConfigError(
            f"--prompts {source}: name a data set as OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT"
        )
    if find_spec("datasets") is None:
        raise ConfigError(
            f"--prompts {source}: there is no such file, and the hub's data sets are read by the package datasets, "
            "which is not installed; pip install datasets, or give a file"
        )
    from datasets import load_dataset

    try:
        rows = load_dataset(name, *wanted, split=split)
    except Exception as error:  # the library raises whatever its many sources do
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--prompts {source}: there is no such file, and no data set of the hub could be had ({reason}); give a "
            "JSONL, JSON or parquet file, or a data set as OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT"
        ) from error
    yield from _numbered(f"--prompts {source}", rows)


def _numbered(where: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, start=1):
        yield f"{where}, row {number}", row


def _user_turns(row: Any, where: str) -> Turns:
    """Empty where no user says anything."""
    said = None
    if isinstance(row, dict):
        if row.get("turns") is not None:
            said = row["turns"]
        elif messages := next((row[name] for name in _CONVERSATIONS if row.get(name)), None):
            said = _said_by_users(messages)
        elif row.get("prompt") is not None:
            said = [row["prompt"]]
    said = [_joined(text) for text in said] if isinstance(said, list) else None
    if said is None or not all(isinstance(text, str) for text in said):
        raise ConfigError(f"{where}: {str(row)[:60]!r} has no text; write {_FORMS}")
    return tuple(text for text in said if text.strip())


def _said_by_users(messages: Any) -> list[Any] | None:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    users = [message for message in messages if message.get("role", message.get("from")) in _USERS]
    return [message.get("content", message.get("value")) for message in users]


def _joined(content: Any) -> Any:
    """The text of a turn that is written in parts, if all of these are text."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if parts and len(texts) == len(parts) else content
