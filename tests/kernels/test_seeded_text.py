"""A request with a seed gets the same text whatever is drafted, verified or batched beside it."""

import pytest
import torch
from dspark_kernels import RoundKeys, SamplingBatch, Windows, accept_ref, draft_block_ref, draw
from token_distribution import SyntheticPair

NUM_TOKENS = 40
SUBJECT = (0.9, -1, 0.95, 0.0, 1234)
MATES = [(0.0, -1, 1.0, 0.0, None), (1.0, -1, 1.0, 0.0, None), (0.8, 5, 1.0, 0.0, 77), (1.2, -1, 0.9, 0.1, None)]


def generate(pair, parameters, *, drafter="good", verify_len=lambda step: 3, engine_seed=1, first_step=0):
    """Texts of the requests ``parameters`` from anchor 0, and how many drafts were accepted in all."""
    rows = SamplingBatch.from_lists(*(list(column) for column in zip(*parameters, strict=True)))
    bs, gamma = len(parameters), pair.gamma
    base_logits = pair.base_logits.expand(bs, -1, -1)
    if drafter == "damaged":
        base_logits = base_logits + 4 * torch.randn(gamma, pair.vocab_size, generator=torch.Generator().manual_seed(9))
    texts, num_accepted, step = [[0] for _ in parameters], 0, first_step
    while min(map(len, texts)) <= NUM_TOKENS:
        anchors = torch.tensor([text[-1] for text in texts])
        keys = RoundKeys(engine_seed, step, torch.arange(bs) + 100, torch.tensor([len(text) for text in texts]))
        if drafter == "none":
            emitted = draw(pair.target_logits[anchors], rows, keys)[:, None]
        else:
            hidden = torch.zeros(bs, gamma, 2)
            block = draft_block_ref(base_logits, hidden, anchors, pair.heads, rows, keys)
            length = verify_len(step)
            chain = torch.cat([anchors[:, None], block.tokens], dim=1)[:, : length + 1]
            windows = Windows(torch.full((bs,), length), torch.arange(bs + 1) * (length + 1))
            accepted = accept_ref(block, windows, pair.target_logits[chain.flatten()], keys.positions, rows, keys)
            emitted, num_accepted = accepted.out_tokens, num_accepted + int(accepted.accept_lens.sum())
        for text, tokens in zip(texts, emitted.tolist(), strict=True):
            text.extend(token for token in tokens if token >= 0)
        step += 1
    return [text[1 : NUM_TOKENS + 1] for text in texts], num_accepted


@pytest.fixture(scope="module")
def pair():
    return SyntheticPair()


@pytest.fixture(scope="module")
def text(pair):
    (text,), _ = generate(pair, [SUBJECT], drafter="none")
    assert len(set(text)) > 5
    return text


@pytest.mark.parametrize("drafter", ["good", "damaged"])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_the_drafter_and_the_verify_length_do_not_matter(pair, text, drafter, length):
    (speculative,), _ = generate(pair, [SUBJECT], drafter=drafter, verify_len=lambda step: length)
    assert speculative == text


def test_the_drafter_matters_for_speed_alone(pair):
    _, good = generate(pair, [SUBJECT])
    _, damaged = generate(pair, [SUBJECT], drafter="damaged")
    assert good > damaged > 0


def test_a_schedule_that_changes_every_step_does_not_matter(pair, text):
    (speculative,), _ = generate(pair, [SUBJECT], verify_len=lambda step: (0, 3, 1, 2, 3)[step % 5])
    assert speculative == text


@pytest.mark.parametrize("index", [0, 2, 4])
def test_the_batch_does_not_matter(pair, text, index):
    batch = [*MATES[:index], SUBJECT, *MATES[index:]]
    texts, _ = generate(pair, batch, engine_seed=5, first_step=1000)
    assert texts[index] == text


def test_another_seed_gives_another_text(pair, text):
    (other,), _ = generate(pair, [(*SUBJECT[:4], 1235)])
    assert other != text


def test_greedy_mates_read_the_targets_argmax(pair):
    texts, _ = generate(pair, [SUBJECT, *MATES])
    expected, token = [], 0
    for _ in range(NUM_TOKENS):
        token = int(pair.target_logits[token].argmax())
        expected.append(token)
    assert texts[1] == expected
