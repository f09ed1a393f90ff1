"""Hidden states in the rows in which SGLang reads them."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang_objects import batch, partly

from sglang_dspark.engine.part import DrawnTokens
from sglang_dspark.features.hidden_states import HiddenStates

# By the rows of a forward, whose states are their numbers: what SGLang has when it looks for those of each token.
PROMPTS = ([2, 3, 1], [0, 1, 2, 3], torch.tensor([7, 8, 9]))
STEP = (None, [0, 2, 3, 6], torch.tensor([[7, 8, -1], [9, -1, -1], [7, 8, 9]]))


@pytest.mark.parametrize(
    ("drawn", "whole_prompts", "expected"),
    [
        (PROMPTS, True, [0, 1, 2, 3, 4, 5]),
        (PROMPTS, False, [1, 4, 5]),
        # Three rows for each request; those after its tokens mean nothing, the last request has as many as there are.
        (STEP, True, [0, 1, None, 2, None, None, 3, 4, 5]),
        (STEP, False, [0, 1, None, 2, None, None, 3, 4, 5]),
    ],
)
def test_rows_of_tokens(drawn, whole_prompts, expected):
    extended, indptr, tokens = drawn
    states = torch.arange(6.0)[:, None].expand(6, 2)
    output = LogitsProcessorOutput(next_token_logits=None, last_hidden_states=states)
    mode = "all" if whole_prompts else "last"
    part = HiddenStates(SimpleNamespace(server_args=SimpleNamespace(return_hidden_states_mode=mode)))
    given = DrawnTokens(torch.tensor([*indptr, 6, 6]), tokens, torch.ones(3))
    asked = batch(*[None] * 3, return_hidden_states=True, extend_lens=extended)
    found = part.tokens_drawn(asked, output, given)
    assert found.last_hidden_states is None and output.last_hidden_states is states
    rows = found.hidden_states[:, 0].tolist()
    assert [row if known is not None else None for row, known in zip(rows, expected, strict=True)] == expected
    assert part.tokens_drawn(partly(type(asked), return_hidden_states=False), output, given) is output
