"""Tell the user of a promise whether it was kept: ``dspark_promise`` in the ``meta_info`` of an answer."""

from __future__ import annotations

from typing import Any

import msgspec
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

from sglang_dspark.engine.compat.arguments import speculating
from sglang_dspark.engine.launch_state import DSparkServer
from sglang_dspark.features.promises.keys import pace_of
from sglang_dspark.fence import fenced, nothing
from sglang_dspark.speculation import KEY, RequestOptions

_NOTED = "dspark_tpot_ms"


@fenced("answers about promises", instead=nothing)
def note(tokenized: Any, manager: Any, request: Any, *args: object, **kwargs: object) -> None:
    """Keep the promise of a request on SGLang's object of it, which is there until its answer is. A hook.

    Args:
        tokenized: what travels to the scheduler, with checked options.
    """
    server = speculating(manager.server_args)
    if not isinstance(server, DSparkServer) or not isinstance(tokenized, TokenizedGenerateReqInput):
        return
    text = (tokenized.sampling_params.custom_params or {}).get(KEY)
    asked = RequestOptions() if text is None else msgspec.json.decode(text, type=RequestOptions)
    tpot_ms = pace_of(asked, server.config.tpot_ms).tpot_ms
    if tpot_ms is not None:
        setattr(request, _NOTED, tpot_ms)


@fenced("answers about promises", instead=nothing)
def report(result: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Add ``dspark_promise`` to the ``meta_info`` of an ended request that has a promise. A hook.

    Args:
        recv_obj: a batch of SGLang's outputs.
        i: index of the request in it.
    """
    state = manager.rid_to_state[recv_obj.rids[i]]
    promised = getattr(state.obj, _NOTED, None)
    if promised is None or (tokens := recv_obj.completion_tokens[i]) < 2:
        return
    stats = state.time_stats
    tpot_ms = 1e3 * (stats.finished_time - stats.first_token_time) / (tokens - 1)
    meta_info["dspark_promise"] = {"promised_ms": promised, "tpot_ms": tpot_ms, "kept": tpot_ms <= promised}
