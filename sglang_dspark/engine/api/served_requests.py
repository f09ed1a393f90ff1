"""Names the request fields, sampling parameters and HTTP routes of SGLang that DSPARK refuses."""

REFUSED_FIELDS = (
    "return_hidden_states",
    "custom_logit_processor",
    "input_embeds",
    "positional_embed_overrides",
    "return_routed_experts",
    "return_indexer_topk",
    "multi_item_delimiter_indices",
    "watermark",
    "return_sampling_mask",
    "max_thinking_tokens",
    "token_indices_to_pool",
    "sampling_logprobs_mode",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
)
"""Fields of a request that DSPARK refuses when they are set."""

REFUSED_PARAMETERS = ("watermark", "beam_width")
"""Sampling parameters that are refused if they ask for something."""

# Most would change or drop the target, and leave the drafter and the draft K/V of cached prefixes behind. Two would
# give the server another part to play. The last one sets what other speculative algorithms read.
REFUSED_ROUTES = (
    "/update_weights_from_disk",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/pd_role_switch",
    "/scale_elastic_ep",
    "/set_internal_state",
)
REFUSED_CHANGES = ("/hicache/storage-backend",)
"""Routes that are only read: other methods than GET would move K/V beyond the host's memory, and the draft K/V not."""


def is_refused(path: str, method: str) -> bool:
    """Return whether a request answers HTTP 400, whatever it asks for.

    Args:
        path: without the server's root path.
        method: of HTTP, in capitals.
    """
    return path in REFUSED_ROUTES or (path in REFUSED_CHANGES and method != "GET")
