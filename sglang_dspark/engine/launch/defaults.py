"""Set the fields of SGLang's ``ServerArgs`` that DSPARK decides."""

import logging
from collections.abc import Callable

import torch
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

from sglang_dspark.draft.window import DraftWindow
from sglang_dspark.engine.sglang_types import ServerArgs
from sglang_dspark.engine.support import ALGORITHM

logger = logging.getLogger(__name__)

# Requests at a time on a small GPU, where decode graphs are fewer: the default of SGLang's own speculative algorithms.
MIN_REQUESTS = 48
# Tokens of the largest step, of 256 requests with blocks of 7; what start-up holds grows with them.
MAX_STEP_TOKENS = 2048
# First tokens that a windowed drafter sees: attention rests on them (StreamingLLM, Xiao et al. 2024, has four).
DRAFT_SINKS = 4


CHOICES = ("handle_model_specific_adjustments", "handle_attention_backend_compatibility")
"""Steps of SGLang's resolution that choose attention, pages and kernels for a target and a GPU."""


def prepare(args: ServerArgs) -> None:
    """Decide what SGLang would decide otherwise when it resolves ``args``, if the operator has not."""
    # Whatever SGLang does with the path of a drafter begins with transformers, which does not know every format: no
    # process of SGLang knows it.
    args.speculative_draft_model_path = None
    # SGLang would say that these have no effect; Launch.after gives them back.
    args.speculative_draft_window_size = args.speculative_draft_sink_size = None
    if args.speculative_draft_model_quantization is None:
        args.speculative_draft_model_quantization = "unquant"  # SGLang would take the target's for the drafter's
    if not (args.attention_backend or args.prefill_attention_backend):
        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device == "cpu":
            args.attention_backend = "torch_native"  # the only one that serves; on a GPU SGLang's choice does
    # Verification has kernels of its own: SGLang shall make one backend, that of prompts.
    args.decode_attention_backend = args.prefill_attention_backend


def choose_as_plain(args: ServerArgs, choose: Callable[[ServerArgs], None]) -> None:
    """Have SGLang choose as it does for a plain server, in one of :data:`CHOICES`.

    For speculation it chooses other attention of prompts on Blackwell, as if they were verified by it.
    """
    if resolving_view(args).speculative_algorithm != ALGORITHM:
        choose(args)
        return
    declare_resolution(args, "dspark", speculative_algorithm=None)
    choose(args)
    declare_resolution(args, "dspark", speculative_algorithm=ALGORITHM)


def draft_window(args: ServerArgs) -> DraftWindow | None:
    """Return the part of a context that the drafter shall see; None for all of it."""
    size, sinks = args.speculative_draft_window_size, args.speculative_draft_sink_size
    return None if size is None else DraftWindow(size, DRAFT_SINKS if sinks is None else sinks)


def size_buffers(args: ServerArgs, window: int) -> None:
    """Fill the fields that size SGLang's buffers and that hold prefills back.

    Args:
        window: the most tokens that a step verifies per request.
    """
    args.speculative_num_draft_tokens = window
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    # SGLang holds prefills of DFLASH servers back until several slots are free; a plain server lets them in at once.
    if args.min_free_slots_delay is None:
        args.min_free_slots_delay = 1


def limit_requests(args: ServerArgs, window: int) -> None:
    """On a GPU, admit as many requests at a time as decode graphs are captured for, if the operator sets no limit.

    Start-up holds memory for all that may run, gigabytes for the thousands that SGLang would admit. So there are fewer
    if blocks are long, or if SGLang captures graphs for more, as it does on four GPUs.
    """
    if args.max_running_requests is None and args.device == "cuda":
        of_graphs = resolving_view(args).cuda_graph_config.decode.max_bs
        admit(args, max(MIN_REQUESTS, min(of_graphs, MAX_STEP_TOKENS // window)))


def admit(args: ServerArgs, requests: int) -> None:
    """Limit the requests at a time, and say so."""
    declare_resolution(args, "dspark", max_running_requests=requests)
    logger.info("DSPARK: limiting concurrent requests to %d; override with --max-running-requests", requests)
