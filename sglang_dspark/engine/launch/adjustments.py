"""Decide which flags a start changes before SGLang reads them: those that change speed alone, and how."""

from collections.abc import Mapping
from dataclasses import replace

from sglang_dspark.config import DSparkConfig, flag_name
from sglang_dspark.engine.launch.context import LaunchContext
from sglang_dspark.engine.launch.flag_rule import Adjustment, flag_of
from sglang_dspark.engine.launch.flag_rules import broken
from sglang_dspark.engine.sglang_types import ServerArgs

LENGTHS: Mapping[str, int] = {
    "speculative_dflash_block_size": 1,
    "speculative_num_draft_tokens": 1,
    "speculative_num_steps": 0,
}
"""Flags that say how long a block of another algorithm is, the first before the others, and how many tokens besides
drafts each counts."""


def of_rules(context: LaunchContext) -> tuple[Adjustment, ...]:
    """Return the flags that rules of the core and of features adjust."""
    return tuple(rule.adjustment(context.args) for rule in broken(context, adjusts=True))


def of_lengths(args: ServerArgs, config: DSparkConfig, most: int | None) -> tuple[DSparkConfig, tuple[Adjustment, ...]]:
    """Return our options with the block that flags of other algorithms ask for, and these flags, dropped.

    Our own flag goes before them.

    Args:
        most: drafts of the drafter's block; None without a drafter.
    """
    given: dict[str, int] = {name: value for name in LENGTHS if (value := getattr(args, name)) is not None}
    if given.get("speculative_num_steps") == 1:  # says nothing: SGLang's own block drafters have no other value
        del given["speculative_num_steps"]
    if not given:
        return config, ()
    is_tree = (args.speculative_eagle_topk or 1) > 1
    drafts = [given[name] - LENGTHS[name] for name in given if not (is_tree and name == "speculative_num_draft_tokens")]
    if config.block_size is None and drafts:
        config = replace(config, block_size=max(1, min(drafts[0], most or drafts[0])))
    block = config.block_size or "the drafter's"
    return config, tuple(
        Adjustment(
            name,
            None,
            f"{flag_of(name)}={value} becomes {flag_name('block_size')}={block}: a block is a chain of drafts behind "
            "an anchor, at most as long as its drafter makes it",
        )
        for name, value in given.items()
    )
