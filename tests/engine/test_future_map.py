"""What SGLang's future map leaves to CUDA graphs, and what it writes itself."""

from types import SimpleNamespace

import pytest
import torch
from dspark_kernels import AcceptResult

from sglang_dspark.engine.scheduler.future_map import create_future_map, relay_of

CPU = torch.device("cpu")
ROWS = torch.tensor([3, 1])


@pytest.fixture(autouse=True)
def no_hidden_states(monkeypatch):
    """SGLang asks the arguments of a server whether these are relayed."""
    monkeypatch.setattr("sglang.srt.speculative.spec_utils.spec_need_hidden_states", lambda: False)


class Pool:
    req_to_token = torch.zeros(5, 8, dtype=torch.int32)


class Algorithm(SimpleNamespace):
    """What the map asks of ours."""

    is_some = is_speculative = lambda self: True
    is_none = is_ngram = need_topk = lambda self: False


def future_map(pool):
    made = create_future_map("cpu", Algorithm(), pool, needs_cpu_seq_lens=False)
    made.output_tokens_buf.zero_()
    made.new_seq_lens_buf.zero_()
    return made


def accepted(lens, tokens):
    return AcceptResult(torch.zeros(2), torch.tensor(tokens), torch.zeros(2, 3), torch.tensor(lens))


def payload(tokens):
    names = ("topk_p", "topk_index", "hidden_states", "draft_probs", "dsa_topk_indices")
    return SimpleNamespace(bonus_tokens=tokens, **dict.fromkeys(names))


def relayed(made, outcome):
    """Lengths and tokens of all rows, after a step that had this outcome."""
    made.publish(ROWS, outcome.new_seq_lens)
    made.stash(ROWS, payload(outcome.bonus_tokens))
    return made.new_seq_lens_buf.tolist(), made.output_tokens_buf.tolist()


@pytest.mark.parametrize("with_relay", [True, False])
def test_what_no_graph_has_entered_is_written(with_relay):
    pool = Pool()
    if with_relay:
        relay_of(pool, CPU)
    made = future_map(pool)
    assert relayed(made, accepted([7, 9], [70, 90])) == ([0, 9, 0, 7, 0], [0, 90, 0, 70, 0])
    assert made.publish_ready is not None


def test_what_a_graph_has_entered_is_there():
    pool = Pool()
    relay = relay_of(pool, CPU)
    made, outcome = future_map(pool), accepted([7, 9], [70, 90])
    relay.enter(ROWS, outcome)
    relay.entered(outcome)
    # A replay has overwritten them meanwhile, and the map must not read them.
    outcome.new_seq_lens.fill_(-1)
    outcome.bonus_tokens.fill_(-1)
    assert relayed(made, outcome) == ([0, 9, 0, 7, 0], [0, 90, 0, 70, 0])
    assert made.publish_ready is not None
    # Another step's, with the same values, are not the graph's.
    assert relayed(made, accepted([-1, -1], [-1, -1])) == ([0, -1, 0, -1, 0], [0, -1, 0, -1, 0])


def test_pools_have_relays_of_their_own():
    one, other = Pool(), Pool()
    assert relay_of(one, CPU) is relay_of(one, CPU) is not relay_of(other, CPU)
    assert future_map(one).new_seq_lens_buf is relay_of(one, CPU).lens
