"""The loop of rollouts: what earns a reward, and where a step goes."""

import numpy as np
import pytest
import torch
from rollouts import learn, reward
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.mark.parametrize(
    ("text", "earned"),
    [("It is 12.", 1.0), (" 5 + 7 = 12.\n\nQ: 13", 1.0), ("12 or 13", 0.0), ("twelve", 0.0)],
)
def test_the_last_number_of_an_answer_counts(text, earned):
    assert reward(text, 12) == earned


def test_what_beats_its_group_becomes_likelier():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes))
    answers = [{"output_ids": [5, 6]}, {"output_ids": [7, 8]}]
    ids = torch.tensor([[1, 2, 3, *answer["output_ids"]] for answer in answers])

    def likely():
        with torch.no_grad():
            logprobs = model(ids[:, :-1]).logits.log_softmax(-1)[:, 2:]
        return logprobs.gather(2, ids[:, 3:, None]).sum(1).flatten().tolist()

    before = likely()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    alike_ones = ([1, 2], answers, np.array([1.0, 1.0]))
    assert learn(model, optimizer, [([1, 2, 3], answers, np.array([1.0, 0.0])), alike_ones]) > 0
    after = likely()
    assert after[0] > before[0] and after[1] < before[1]
