"""Names the request fields, sampling parameters and HTTP routes of SGLang that DSPARK refuses."""

_OTHER_LOGPROBS = "rows of a verification have log-probabilities in the usual form alone"
_ONE_BY_ONE = "it looks at the tokens before each new one, and SGLang does not know drafts as such"
REFUSED_FIELDS = {
    "custom_logit_processor": _ONE_BY_ONE,
    "input_embeds": "a drafter reads the token ids of a prompt",
    "positional_embed_overrides": "a drafter reads the token ids of a prompt",
    "return_indexer_topk": "a verification has rows of drafts that are rejected, and SGLang would return theirs too",
    "multi_item_delimiter_indices": "it scores a prompt, which a server without DSPARK does as fast",
    "watermark": _ONE_BY_ONE,
    "return_sampling_mask": "tokens are drawn without a mask that could be returned",
    "token_indices_to_pool": "it scores a prompt, which a server without DSPARK does as fast",
    "sampling_logprobs_mode": _OTHER_LOGPROBS,
    "return_flat_raw_top_logprobs": _OTHER_LOGPROBS,
    "return_flat_raw_output_top_logprobs": _OTHER_LOGPROBS,
}
"""Fields of a request that DSPARK refuses when they are set, with the reasons."""

REFUSED_PARAMETERS = {"watermark": _ONE_BY_ONE, "beam_width": "each beam would have drafts of its own"}
"""Sampling parameters that are refused if they ask for something, with the reasons."""

# Two would give the server another part to play. The last one sets what other speculative algorithms read.
REFUSED_ROUTES = (
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
