"""SGLang's future map leaves some fields to CUDA graphs and writes the others."""

import pytest
import torch
from dspark_kernels import AcceptResult
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload, offer_future_relay_buffers
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang_objects import table

from sglang_dspark.engine.draft_input import DSparkDraftInput
from sglang_dspark.engine.graphs import Relay

CPU = torch.device("cpu")
ROWS = torch.tensor([3, 1])


@pytest.fixture(autouse=True)
def no_hidden_states(monkeypatch):
    """SGLang asks the arguments of a server whether these are relayed."""
    monkeypatch.setattr("sglang.srt.speculative.spec_utils.spec_need_hidden_states", lambda: False)


@pytest.fixture(autouse=True)
def no_relay():
    """Buffers that one test offers are not adopted by the map of another."""
    yield
    offer_future_relay_buffers(None)


def future_map():
    made = FutureMap("cpu", SpeculativeAlgorithm.DFLASH, table(4, 8), needs_cpu_seq_lens=False)
    made.output_tokens_buf.zero_()
    made.new_seq_lens_buf.zero_()
    return made


def accepted(lens, tokens):
    return AcceptResult(torch.zeros(2), torch.tensor(tokens), torch.zeros(2, 3), torch.tensor(lens))


def relayed(made, outcome):
    """Lengths and tokens of all rows, after a step that had this outcome."""
    made.publish(ROWS, outcome.new_seq_lens)
    state = DSparkDraftInput(outcome.bonus_tokens, outcome.new_seq_lens)
    made.stash(ROWS, RelayPayload.from_draft_input(state))
    return made.new_seq_lens_buf.tolist(), made.output_tokens_buf.tolist()


@pytest.mark.parametrize("with_relay", [True, False])
def test_what_no_graph_has_written_is_written(with_relay):
    if with_relay:
        Relay(5, CPU)
    made = future_map()
    assert relayed(made, accepted([7, 9], [70, 90])) == ([0, 9, 0, 7, 0], [0, 90, 0, 70, 0])
    assert made.publish_ready is not None


def test_what_a_graph_has_written_is_there():
    relay = Relay(5, CPU)
    made, outcome = future_map(), accepted([7, 9], [70, 90])
    for _ in range(2):  # replays have the same tensors
        relay.write(ROWS, outcome)
        relay.was_written(outcome)
        # The next replay overwrites them, and the map must not read them.
        kept = outcome.new_seq_lens.clone(), outcome.bonus_tokens.clone()
        outcome.new_seq_lens.fill_(-1)
        outcome.bonus_tokens.fill_(-1)
        assert relayed(made, outcome) == ([0, 9, 0, 7, 0], [0, 90, 0, 70, 0])
        outcome.new_seq_lens.copy_(kept[0])
        outcome.bonus_tokens.copy_(kept[1])
    assert made.publish_ready is not None
    # Another step's, with the same values, are not the graph's.
    assert relayed(made, accepted([-1, -1], [-1, -1])) == ([0, -1, 0, -1, 0], [0, -1, 0, -1, 0])
