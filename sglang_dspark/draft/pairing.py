"""Does a drafter belong to a target? Decided from the two configurations, before anything is loaded."""

from typing import Any

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import ConfigError

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Target families that are served."""


def check_target(draft: DraftConfig, target: Any) -> None:
    """Refuse a drafter that was made for another target.

    Args:
        draft: configuration of the drafter.
        target: Hugging Face text configuration of the target.

    Raises:
        ConfigError: unsupported target family, or a dimension that differs between the two.
    """
    architectures = list(getattr(target, "architectures", None) or [])
    if not set(architectures) & set(TARGET_ARCHITECTURES):
        raise ConfigError(
            f"--model-path: target architecture {architectures} is not served with DSPARK; "
            f"served are {', '.join(TARGET_ARCHITECTURES)}"
        )
    pairs = {
        "hidden_size": (draft.hidden_size, target.hidden_size),
        "vocab_size": (draft.vocab_size, target.vocab_size),
        "num_target_layers": (draft.num_target_layers, target.num_hidden_layers),
    }
    for key, (of_draft, of_target) in pairs.items():
        if of_draft != of_target:
            raise ConfigError(
                f"--speculative-draft-model-path: the drafter's {key} is {of_draft}, the target's is {of_target}; "
                "pass a drafter that was trained for this target"
            )
