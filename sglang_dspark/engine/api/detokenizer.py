"""Says what a stream shows of a text that ends within a letter: the plugin's part of SGLang's detokenizer."""

from __future__ import annotations

_INCOMPLETE = "\ufffd"


def whole_letters(text: str) -> str:
    """Return the new text of a stream up to the letter within which it ends. A hook.

    SGLang shows the text up to an ideograph just before that letter, or up to the last space. With a token in a step
    little else can stand there. With several, the next text may end within another letter, before which that rule finds
    less: SGLang takes back what it has shown, and then shows it again; and a text without ideographs and spaces may not
    be shown for many steps. What precedes an incomplete letter does not change any more, so all of it is shown.
    """
    return text.rstrip(_INCOMPLETE)
