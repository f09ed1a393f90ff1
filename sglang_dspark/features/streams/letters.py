"""Says what a stream shows of a text that ends within a letter: the plugin's part of SGLang's detokenizer."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.hooks import Moment, hook

_INCOMPLETE = "\ufffd"


@hook(
    "sglang.srt.managers.detokenizer_manager.find_printable_text",
    HookType.REPLACE,
    where="children",
    reason="SGLang shows text twice, or late, if messages after each other end within different letters, as steps may",
    by=Moment.SOME_TIME,  # called in the detokenizer alone
)
def whole_letters(text: str) -> str:
    """Return the new text of a stream up to the letter within which it ends. A hook.

    SGLang shows the text up to an ideograph just before that letter, or up to the last space. With a token in a step
    little else can stand there. With several, the next text may end within another letter, before which that rule finds
    less, and SGLang shows text twice. A text without ideographs and spaces may stay hidden for many steps. All that
    precedes the incomplete letter is shown here instead.
    """
    return text.rstrip(_INCOMPLETE)
