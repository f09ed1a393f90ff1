import torch
from dspark_training.texts import Text, keep_states, states_of


def test_kept_states_equal_those_of_a_target_that_runs_in_every_step(target, rows):
    texts = [Text(row.input_ids, row.prompt_len) for row in rows]
    stored, computed = states_of(target, keep_states(target, texts, batch_tokens=40)), states_of(target, texts)
    for i, text in enumerate(texts):
        before_last = slice(len(text.input_ids) - 1)
        for name in ("features", "last_hidden"):
            expected, found = getattr(computed, name)[i, before_last], getattr(stored, name)[i, before_last]
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
