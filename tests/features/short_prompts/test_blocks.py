"""Prompts are cut into blocks that a verification has room for, and nothing of them is lost or read twice."""

import pytest

from sglang_dspark.features.short_prompts.verification import Blocks


@pytest.mark.parametrize("width", [1, 3, 8])
def test_blocks_are_the_prompts(width):
    lengths, contexts = [1, 8, 3, 17], [5, 0, 64, 2]
    blocks, depth = Blocks.of(lengths, contexts, width), width - 1
    found: list[tuple[int, int]] = []  # of each row: its prompt, its position
    for block, (owner, context, anchor) in enumerate(zip(blocks.owners, blocks.contexts, blocks.anchors, strict=True)):
        drafts, ranks = (part[block * depth :][:depth] for part in (blocks.drafts, blocks.ranks))
        num = ranks.count(1.0)
        assert ranks == [1.0] * num + [-1.0] * (depth - num)
        assert [anchor, *drafts] == [len(found) + min(column, num) for column in range(width)]
        found += [(owner, context + column) for column in range(num + 1)]
    expected = [
        (prompt, context + i)
        for prompt, (length, context) in enumerate(zip(lengths, contexts, strict=True))
        for i in range(length)
    ]
    assert found == expected
    assert blocks.num_rows == len(found)
    assert [found[last] for last in blocks.lasts] == [(0, 5), (1, 7), (2, 66), (3, 18)]
