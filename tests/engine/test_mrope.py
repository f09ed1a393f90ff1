"""Rows of a verification stand behind the pictures of their own request; in captured steps: test_static_verify.py."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.engine.forward.capture import keep_embeddings
from sglang_dspark.engine.forward.mrope import keep_deltas, make_table, place_rows


def runner_with_slots(slots, *, mrope=True):
    runner = SimpleNamespace(
        model_config=SimpleNamespace(model_is_mrope=mrope),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(slots, 4)),
        device="cpu",
    )
    make_table(runner)
    return runner


def prefill(runner, deltas):
    """Encode prompts by request slot; those of text alone have no delta."""
    inputs = [
        None if delta is None else SimpleNamespace(mrope_position_delta=torch.tensor([[delta]]))
        for delta in deltas.values()
    ]
    keep_deltas(runner, SimpleNamespace(req_pool_indices=torch.tensor(list(deltas)), multimodal_inputs=inputs))


def verification(slots, requests, positions):
    return SimpleNamespace(
        req_pool_indices=torch.tensor(slots),
        spec_info=SimpleNamespace(requests=torch.tensor(requests)),
        positions=torch.tensor(positions),
    )


def test_rows_of_ragged_requests():
    runner = runner_with_slots(6)
    prefill(runner, {4: -7, 1: None, 2: -30})
    batch = verification([2, 1, 4], [0, 0, 0, 1, 2, 2], [50, 51, 52, 9, 20, 21])
    place_rows(batch, runner)
    assert batch.mrope_positions.tolist() == [[20, 21, 22, 9, 13, 14]] * 3


def test_a_slot_that_is_taken_again():
    runner = runner_with_slots(3)
    prefill(runner, {2: -7})
    prefill(runner, {2: None})
    place_rows(batch := verification([2], [0, 0], [5, 6]), runner)
    assert batch.mrope_positions.tolist() == [[5, 6]] * 3


def test_other_targets_have_no_table():
    runner = runner_with_slots(3, mrope=False)
    keep_deltas(runner, None)
    assert not hasattr(runner, "mrope_deltas")


@pytest.mark.parametrize("pictures", [True, False])
def test_a_drafter_reads_embeddings_from_before_the_first_layer(pictures):
    """The first layer adds to the embeddings in place on a GPU."""
    embeddings = torch.ones(2, 3)
    batch = SimpleNamespace(mm_input_embeds=embeddings if pictures else None)
    keep_embeddings(embeddings, None, batch)
    embeddings += 1
    assert (batch.mm_input_embeds is None) if not pictures else batch.mm_input_embeds.eq(1).all()
