"""Requests of a scheduler that are promised times."""

import msgspec
from sglang.srt.managers.schedule_batch import FINISH_LENGTH
from sglang_objects import request

from sglang_dspark.features.promises.keys import PromiseKeys
from sglang_dspark.speculation import KEY


def asking(prompt=(0,), rid="r", **asked):
    """SGLang's request with these options."""
    options = {"promises": PromiseKeys(**asked)}
    made = request((), prompt, rid, custom_params={KEY: msgspec.json.encode(options).decode()} if asked else None)
    made.finished_reason = FINISH_LENGTH(9)
    return made
