import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from sglang_dspark.tools.train import decoding
from sglang_dspark.tools.train.decoding import decode
from sglang_dspark.tools.train.rows import CorpusRow
from sglang_dspark.tools.train.target import Target

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 8,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 33, 41], [60, 4], [12, 13, 14, 15, 16]]


@pytest.fixture(params=[(8192, 64), (6, 64), (8192, 4), (6, 1)], ids=["one piece", "pieces", "growing", "all columns"])
def pieces(request, monkeypatch):
    """All prompts in one piece, or one or two at a time; a cache that holds the whole texts at once, or grows."""
    prefill_tokens, growth = request.param
    monkeypatch.setattr(decoding, "_PREFILL_TOKENS_CPU", prefill_tokens)
    monkeypatch.setattr(decoding, "_GROWTH", growth)


def greedy_alone(target: Target, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Greedy continuation of one prompt by transformers, the whole text re-run for every token."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(target.model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in target.stop_ids:
            break
    return ids[len(prompt) :]


def answer(row: CorpusRow) -> list[int]:
    return row.input_ids[row.prompt_len :].tolist()


@pytest.mark.usefixtures("pieces")
def test_batched_greedy_equals_decoding_each_prompt_alone(target):
    alone = [greedy_alone(target, prompt, 12) for prompt in PROMPTS]
    written = decode(target, PROMPTS, [0.0] * len(PROMPTS), 12, torch.Generator())
    assert [answer(row) for row in written] == alone


@pytest.mark.usefixtures("pieces")
def test_rows_that_stop_leave_the_batch_without_disturbing_the_others(target):
    alone = [greedy_alone(target, prompt, 12) for prompt in PROMPTS]
    # Make two of the texts end early, at different steps, so that the batch is compacted.
    stopping = Target(target.model, target.tap_ids)
    stopping.stop_ids = frozenset({alone[0][2], alone[2][4]})
    written = decode(stopping, PROMPTS, [0.0] * len(PROMPTS), 12, torch.Generator())
    expected = [greedy_alone(stopping, prompt, 12) for prompt in PROMPTS]
    assert [answer(row) for row in written] == expected
    assert min(map(len, expected)) < 12


@pytest.mark.usefixtures("pieces")
def test_kept_states_equal_a_fresh_forward_over_the_text(target):
    written = decode(target, PROMPTS, [0.0, 1.0, 1.0, 0.0], 10, torch.Generator().manual_seed(3), keep_states=True)
    for w in written:
        output = target.model(w.input_ids[None, :-1], output_hidden_states=True)
        taps = torch.cat([output.hidden_states[tap + 1] for tap in target.tap_ids], dim=-1)[0]
        torch.testing.assert_close(w.features, taps, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(w.last_hidden, output.hidden_states[-1][0], atol=2e-4, rtol=2e-4)


@pytest.mark.usefixtures("pieces")
def test_sliding_windows_see_no_further_than_without_a_cache():
    """Columns that are not written yet move no window."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(**SIZES, num_key_value_heads=1, sliding_window=6, layer_types=kinds)
    model = AutoModelForCausalLM.from_config(config).float()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    target = Target(model, (0, 2))
    written = decode(target, PROMPTS, [0.0] * len(PROMPTS), 20, torch.Generator())
    assert [answer(row) for row in written] == [greedy_alone(target, prompt, 20) for prompt in PROMPTS]


def test_sampled_tokens_follow_the_target_distribution(target):
    prompt = PROMPTS[1]
    probs = torch.softmax(target.model(torch.tensor([prompt])).logits[0, -1], dim=-1)
    written = decode(target, [prompt] * 4000, [1.0] * 4000, 1, torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.tensor([answer(row)[0] for row in written]), minlength=64)
    # Half the L1 distance of 4000 draws to their own law is about 0.4 * sqrt(64 / 4000) = 0.05 at most.
    assert float((counts / 4000 - probs).abs().sum() / 2) < 0.06


def test_progress_counts_every_text_once_however_early_it_ends(target):
    """One step before the limit nearly all is done; what stops early is counted when the batch ends."""
    alone = greedy_alone(target, PROMPTS[0], 12)
    stopping = Target(target.model, target.tap_ids)
    stopping.stop_ids = frozenset({alone[2]})
    for writer, tokens in ((target, 12), (stopping, 12), (stopping, 40)):
        steps: list[float] = []
        decode(writer, PROMPTS, [0.0] * len(PROMPTS), tokens, torch.Generator(), on_progress=steps.append)
        assert sum(steps) == pytest.approx(len(PROMPTS))
        assert steps[0] == pytest.approx(len(PROMPTS) / tokens)
