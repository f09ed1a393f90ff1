"""Read the users' turns of prompt files, of data sets of conversations, and of those on the Hugging Face hub.

A row is one of these, and of conversations only the turns of the user are read: the target answers them itself.

- ``{"turns": [text, ...]}``
- ``{"messages": [{"role": "user", "content": text}, ...]}``
- ``{"conversations": [{"from": "human", "value": text}, ...]}`` (ShareGPT), or with role and content; the key
  may be ``conversation``
- ``{"prompt": text}``

A text may be a list of parts ``{"type": "text", "text": text}``. Of a row with several of these forms the first one is
read: data sets repeat the first turn of a conversation as its prompt. The rows of one source have the same columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dspark.errors import ConfigError

Turns = tuple[str, ...]
"""The user's turns of a conversation, at least one."""

_KINDS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_CONVERSATIONS = ("messages", "conversations", "conversation")
_USERS = ("user", "human")
_FORMS = '{"turns": [text, ...]}, {"prompt": text}, {"messages": [...]} or {"conversations": [...]}'


def read_conversations(source: str) -> list[Turns]:
    """Return the conversations of a file (JSONL, JSON or parquet), of a folder of them, or of a data set of the hub.

    Rows in which no user says anything are left out.

    Args:
        source: a path, or the name of a data set, with ``:SPLIT`` or ``:CONFIG:SPLIT`` behind it if it is not the split
            ``train`` of its only configuration.

    Raises:
        ConfigError: there is none, it cannot be read, a row is of no known form, or no row is left.
    """
    try:
        rows = _load(source)
    except Exception as error:  # the library raises whatever its many sources do
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--prompts {source}: cannot be read ({reason}); give a JSONL, JSON or parquet file, a folder of one kind "
            "of them, or a data set of the hub as OWNER/NAME, OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT"
        ) from error
    numbered = enumerate(rows, start=1)
    found = [turns for number, row in numbered if (turns := _user_turns(row, f"--prompts {source}, row {number}"))]
    if not found:
        raise ConfigError(f"--prompts {source} is empty; name prompts or conversations, in rows of {_FORMS}")
    return found


def _load(source: str) -> Any:
    from datasets import load_dataset

    path = Path(source).expanduser()
    if not path.exists():
        name, *wanted = source.split(":")
        split = (wanted.pop() if wanted else "") or "train"
        return load_dataset(name, *wanted, split=split)
    files = sorted(file for file in path.iterdir() if file.suffix in _KINDS) if path.is_dir() else [path]
    kinds = {_KINDS.get(file.suffix, "json") for file in files}
    if len(kinds) != 1:
        raise ValueError(f"the folder has {len(kinds)} kinds of files out of {', '.join(_KINDS)}")
    return load_dataset(kinds.pop(), data_files=[str(file) for file in files], split="train")


def _user_turns(row: dict[str, Any], where: str) -> Turns:
    """Return an empty tuple if no user says anything."""
    said: Any = None
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
    users = [message for message in messages if (message.get("role") or message.get("from")) in _USERS]
    return [message.get("value") if message.get("content") is None else message["content"] for message in users]


def _joined(content: Any) -> Any:
    """Return the text of a turn that is written in parts, if all of these are text."""
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    return "".join(texts) if parts and len(texts) == len(parts) else content
