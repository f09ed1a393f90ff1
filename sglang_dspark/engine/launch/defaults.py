"""What DSPARK decides of SGLang's ``ServerArgs``."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

logger = logging.getLogger(__name__)

# Requests at a time on a small GPU, where decode graphs are fewer: the default of SGLang's own speculative algorithms.
FEWEST_REQUESTS = 48
# Tokens of the largest step, of 256 requests with blocks of 7; what start-up holds grows with them.
MOST_TOKENS_OF_A_STEP = 2048


def serve_text(args: Any) -> None:
    """Have a target that reads images served as its text model, where the user left it open.

    Else SGLang would try a picture on it when it starts, which is refused, and give up.
    """
    if args.enable_multimodal is None:
        args.enable_multimodal = False


def use_one_pool(server_args: Any, target: Any) -> None:
    """Keep the K/V of layers that see a window of the context with that of the others.

    SGLang would give them a second pool, of fewer slots with numbers of their own, which verification does not know.

    Args:
        target: SGLang's ``ModelConfig``, made before this was settled.
    """
    if target.is_hybrid_swa:
        server_args.disable_hybrid_swa_memory = True
        logger.info("DSPARK: all layers of the target in one K/V pool, as with --disable-hybrid-swa-memory")


def limit_requests(server_args: Any, max_verify: int) -> None:
    """On a GPU, where the user left it open, have as many requests at a time as decode graphs are captured for.

    Start-up holds memory for all that may run, gigabytes for the thousands that SGLang would admit. So there are fewer
    where blocks are long, or where SGLang captures graphs for more, as it does on four GPUs.
    """
    if server_args.device == "cuda" and server_args.max_running_requests is None:
        of_graphs = resolving_view(server_args).cuda_graph_config.decode.max_bs
        of_memory = MOST_TOKENS_OF_A_STEP // (max_verify + 1)
        server_args.max_running_requests = max(FEWEST_REQUESTS, min(of_graphs, of_memory))
        logger.info(
            "DSPARK: at most %d requests at a time; --max-running-requests sets another number",
            server_args.max_running_requests,
        )


def fill(server_args: Any, max_verify: int) -> None:
    """Fill the fields that size SGLang's buffers and that hold prefills back."""
    # SGLang's tokens per request and step: the anchor and the drafts that may be verified.
    server_args.speculative_num_draft_tokens = max_verify + 1
    server_args.speculative_num_steps = 1
    server_args.speculative_eagle_topk = 1
    # SGLang holds prefills of DFLASH servers back until several slots are free; a plain server lets them in at once.
    if server_args.min_free_slots_delay is None:
        server_args.min_free_slots_delay = 1
