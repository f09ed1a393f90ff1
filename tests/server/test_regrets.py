"""Regrets judge texts in 16 bits: right ones are not regretted, a wrong token is."""

from golden_server import CASES, endless, output_ids
from regrets import regrets

PROMPTS = [case["prompt_ids"] for case in CASES[:3]]


def test_a_wrong_token_is_regretted_and_no_other_before_it(plain):
    texts = output_ids(plain, [endless(prompt, 16) for prompt in PROMPTS], 1)
    found = regrets(plain, PROMPTS, texts)
    assert [len(regret) for regret in found] == [16] * len(PROMPTS)
    assert max(map(max, found)) < 1e-3
    texts[1][5] = 0  # a token that no text of the target has
    [wrong] = regrets(plain, PROMPTS[1:2], texts[1:2])
    assert max(wrong[:5]) < 1e-3 < 1 < wrong[5]
