"""Refuse a stop expression that does not compile."""

import re
from collections.abc import Callable


def parse_stop_regex(original: Callable[[str], int], pattern: str) -> int:
    """Hook around SGLang's parsing of a ``stop_regex``.

    Raises:
        ValueError: it is no regular expression; SGLang answers HTTP 400.
    """
    try:
        return original(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(
            f"sampling_params.stop_regex is not a regular expression: {error}; correct or drop it"
        ) from error
