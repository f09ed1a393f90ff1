"""Does a drafter belong to a target? Decided from the two configurations, before anything is loaded."""

from typing import Any

from sglang_dspark.draft.config import DraftConfig
from sglang_dspark.errors import UnservedError

TARGET_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Target families that are served."""


def check_architecture(target: Any) -> None:
    """Refuse a target that is not served.

    Args:
        target: Hugging Face text configuration of the target.

    Raises:
        UnservedError: its family is not served.
    """
    architectures = list(getattr(target, "architectures", None) or [])
    if not set(architectures) & set(TARGET_ARCHITECTURES):
        raise UnservedError(
            f"--model-path: target architecture {architectures} is not served with DSPARK; "
            f"served are {', '.join(TARGET_ARCHITECTURES)}"
        )


def check_target(draft: DraftConfig, target: Any) -> None:
    """Refuse a target that is not served, or a drafter that was made for another target.

    Args:
        draft: configuration of the drafter.
        target: Hugging Face text configuration of the target.

    Raises:
        UnservedError: the target's family is not served.
        CheckpointError: a dimension differs between the two.
    """
    check_architecture(target)
    draft.check_target(
        hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_hidden_layers=target.num_hidden_layers
    )
