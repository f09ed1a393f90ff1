"""Keeps streams from showing a letter twice: the one part of the plugin that works in SGLang's detokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keep_shown(original: Callable[..., list[str]], manager: Any, output: Any) -> list[str]:
    """Return the new text of every request of ``output``, and never take back what a stream has shown. A hook.

    If the text ends within a letter, SGLang shows what certainly precedes it: all up to an ideograph just before it, or
    up to the last space. With several tokens in a step, the next text may end within another letter, before which
    less is certain by that rule. SGLang then counts less as shown, and shows the difference again.
    """
    statuses = manager.decode_status
    shown = {rid: statuses[rid].sent_offset for rid in output.rids if rid in statuses}
    texts = original(manager, output)
    for rid in shown.keys() & statuses.keys():
        statuses[rid].sent_offset = max(statuses[rid].sent_offset, shown[rid])
    return texts
