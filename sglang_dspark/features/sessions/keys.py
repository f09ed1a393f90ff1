"""Refuse keys of ``session_params`` that SGLang does not know."""

from __future__ import annotations

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams

from sglang_dspark.declared import truncate
from sglang_dspark.engine.sglang_types import TokenizerManager


def check_keys(
    manager: TokenizerManager, obj: GenerateReqInput | EmbeddingReqInput, *args: object, **kwargs: object
) -> None:
    """Hook before SGLang makes what travels to the scheduler.

    Raises:
        ValueError: names an unknown key; SGLang answers HTTP 400.
    """
    given, known = getattr(obj, "session_params", None) or {}, SessionParams.__struct_fields__
    for key in given:
        if key not in known:
            raise ValueError(f"session_params.{truncate(key)} is no key of a session; pass {', '.join(known)}")
