"""Report how many drafts a request had, in the ``meta_info`` of its answer.

SGLang carries the counts of every request to its answer. It takes the drafts of every step to be as many as a step may
have, so what follows from the real number is corrected here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.plugins.hook_registry import HookType

from sglang_dspark.engine.carried import drafted_tokens
from sglang_dspark.engine.hooks import hook
from sglang_dspark.engine.sglang_types import TokenizerManager
from sglang_dspark.features.reports.acceptance import NOTED, MetaInfo, RequestCounts
from sglang_dspark.fence import fenced, nothing

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchStrOutput, BatchTokenIDOutput


@hook(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    HookType.AFTER,
    where="front_end",
    reason="SGLang assumes that every draft is verified, and understates the acceptance of requests",
)
@fenced("counts of requests", instead=nothing)
def report(
    result: None, manager: TokenizerManager, meta_info: MetaInfo, recv_obj: BatchStrOutput | BatchTokenIDOutput, i: int
) -> None:
    """Add ``dspark`` to the ``meta_info`` of an ended request, and correct SGLang's figures there. A hook.

    The request keeps its ``meta_info`` for its stream, which may have to tell of it.

    Args:
        recv_obj: a batch of SGLang's outputs; ``engine/carried.py`` says what it counts.
        i: index of the request in it.
    """
    counts = _counts(recv_obj, i)
    if counts is None:
        return
    meta_info["dspark"] = counts
    meta_info.pop("spec_block_accept_length", None)  # if SGLang has carried the proposed drafts under its name
    if "spec_accept_rate" in meta_info:
        verified = counts["verified_tokens"]
        meta_info["spec_accept_rate"] = counts["accepted_tokens"] / verified if verified else 0.0
        meta_info["spec_num_proposed_drafts"] = verified
    setattr(manager.rid_to_state[recv_obj.rids[i]].obj, NOTED, meta_info)


def _counts(recv_obj: BatchStrOutput | BatchTokenIDOutput, i: int) -> RequestCounts | None:
    """Return the counts of a request; None if it took part in no decode step."""
    rounds = recv_obj.spec_verify_ct[i] if getattr(recv_obj, "spec_verify_ct", None) else 0
    if not rounds:
        return None
    accepted = recv_obj.spec_num_correct_drafts[i]
    return {
        "rounds": rounds,
        "drafted_tokens": drafted_tokens(recv_obj, i),
        "verified_tokens": recv_obj.spec_num_cap_tokens[i] - rounds,
        "accepted_tokens": accepted,
        "accept_length": (accepted + rounds) / rounds,
    }
