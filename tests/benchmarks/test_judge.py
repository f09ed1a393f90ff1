"""The judge of texts in 16 bits: it excuses what two plain batches do, and no leak of half a percent of the tokens."""

import pytest
import torch
from golden_replay import load_golden
from judge import LEAK, NEAR_TIE, Judge, judged_tokens, power
from stage_loop import DATA, DRAFT
from transformers import AutoModelForCausalLM, DynamicCache

TARGET = DATA / "target"
TOKENS = 64


@pytest.fixture(scope="module")
def judge():
    return Judge(TARGET, "cpu", NEAR_TIE["bfloat16"])


@pytest.fixture(scope="module")
def prompts():
    return [case.prompt_ids[shift:] for case in load_golden(DRAFT).cases for shift in (0, 3)]


@torch.inference_mode()
def written(prompts, *, together, leak=0.0):
    """Return texts of a server in bfloat16 that runs so many prompts at a time, of which some tokens are wrong."""
    network = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.bfloat16).eval()
    generator, texts = torch.Generator().manual_seed(1), []
    for start in range(0, len(prompts), together):
        batch = prompts[start : start + together]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        cache, columns = DynamicCache(), []
        for _ in range(TOKENS):
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            output = network(ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
            # The runner-up is what is hardest to notice.
            wrong = (torch.rand(len(batch), 1, generator=generator) < leak).long()
            ids = output.logits[:, -1].topk(2).indices.gather(1, wrong)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            columns.append(ids)
        texts += torch.cat(columns, dim=1).tolist()
    return texts


@pytest.mark.slow
def test_two_plain_servers_pass_and_a_leak_does_not(judge, prompts):
    expected, other = written(prompts, together=8), written(prompts, together=3)
    splits = judge.splits(prompts, expected, other)
    assert all(split.explained for split in splits)
    leaking = written(prompts, together=3, leak=LEAK)
    found = judge.splits(prompts, expected, leaking, [other])
    assert any(not split.explained for split in found)
    assert power(judged_tokens(leaking, found), judge.tie_share(prompts, expected)) > 0.95


def test_a_split_of_the_target_alone_is_excused(judge, prompts):
    expected, got, other = [4, 5, 6], [4, 9, 1], [4, 9, 7]
    [split] = judge.splits(prompts[:1], [expected], [got])
    assert (split.position, split.expected, split.got, split.explained) == (1, 5, 9, split.near_tie)
    assert judge.splits(prompts[:1], [expected], [got], [[other]])[0].emitted
    assert not judge.splits(prompts[:1], [expected], [got], [[[8, 9, 1]]])[0].emitted
    assert judge.splits(prompts[:1], [expected], [expected]) == []


def test_a_text_that_merely_ends_earlier_is_no_near_tie(judge, prompts):
    [split] = judge.splits(prompts[:1], [[4, 5, 6]], [[4, 5]])
    assert not split.explained
    assert judge.splits(prompts[:1], [[4, 5, 6]], [[4, 5]], [[[4, 5]]])[0].explained


def test_only_what_comes_before_a_difference_is_judged(judge, prompts):
    texts, expected = [[4, 9, 1, 1], [4, 5, 6, 7]], [[4, 5, 6, 7]] * 2
    assert judged_tokens(texts, judge.splits(prompts[:2], expected, texts)) == 2 + 4


def test_power_is_that_of_a_count():
    draws = torch.rand((20_000, 300), generator=torch.Generator().manual_seed(0))
    ties = torch.rand(draws.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    noticed = ((draws < LEAK) & ~ties).any(dim=1).double().mean()
    assert power(300, 0.1) == pytest.approx(float(noticed), abs=0.01)
