"""Rows of a verification stand after the pictures of their own request."""

import pytest
import torch
from sglang.srt.managers.schedule_batch import MultimodalInputs
from sglang_objects import batch, forward, model_config, partly, table, worker

from sglang_dspark.engine.verify import DSparkVerifyInput
from sglang_dspark.features.pictures import Positions, keep_embeddings, place_rows


def worker_with_slots(slots, *, mrope=True):
    return worker(model_config=model_config(model_is_mrope=mrope), req_to_token_pool=table(slots - 1, 4), device="cpu")


def positions_with_slots(slots):
    made = worker_with_slots(slots)
    positions = Positions.of(made)
    positions.attention_made()
    return made.model_runner, positions


def prefill(positions, deltas):
    """Encode prompts by request slot; those of text only have no delta."""
    inputs = [
        None if delta is None else partly(MultimodalInputs, mrope_position_delta=torch.tensor([[delta]]))
        for delta in deltas.values()
    ]
    positions.prefill_comes(batch(req_pool_indices=torch.tensor(list(deltas)), multimodal_inputs=inputs))


def verification(slots, requests, positions):
    slots, requests, positions = map(torch.tensor, (slots, requests, positions))
    return forward(req_pool_indices=slots, spec_info=partly(DSparkVerifyInput, requests=requests), positions=positions)


def test_rows_of_ragged_requests():
    runner, positions = positions_with_slots(6)
    prefill(positions, {4: -7, 1: None, 2: -30})
    place_rows(rows := verification([2, 1, 4], [0, 0, 0, 1, 2, 2], [50, 51, 52, 9, 20, 21]), runner)
    assert rows.mrope_positions.tolist() == [[20, 21, 22, 9, 13, 14]] * 3


def test_a_slot_that_is_taken_again():
    runner, positions = positions_with_slots(3)
    prefill(positions, {2: -7})
    prefill(positions, {2: None})
    place_rows(rows := verification([2], [0, 0], [5, 6]), runner)
    assert rows.mrope_positions.tolist() == [[5, 6]] * 3


def test_a_replay_reads_the_requests_of_its_step():
    """And their deltas, which belong to other pictures than when the step was captured."""
    _, positions = positions_with_slots(6)
    captured = positions.captured(requests=3, rows=3)
    rows = verification([0, 0, 0], [0, 0, 0], [0, 0, 0])
    found = []
    for slots, delta in (([3, 5, 0], -10), ([5, 3, 0], -20)):
        prefill(positions, {3: delta, 5: -2})
        rows.req_pool_indices.copy_(torch.tensor(slots))
        rows.positions.copy_(torch.tensor([40, 41, 8]))
        rows.spec_info.requests.copy_(torch.tensor([0, 0, 1]))
        captured.stage(None)
        captured.prepare(None, rows)
        found.append(rows.mrope_positions.tolist())
    assert found == [[[30, 31, 6]] * 3, [[38, 39, -12]] * 3]


def test_positions_of_one_coordinate_are_left_alone():
    assert Positions.of(worker_with_slots(3, mrope=False)) is None


@pytest.mark.parametrize("pictures", [True, False])
def test_a_drafter_reads_embeddings_from_before_the_first_layer(pictures):
    """The first layer adds to the embeddings in place on a GPU."""
    embeddings = torch.ones(2, 3)
    rows = forward(mm_input_embeds=embeddings if pictures else None)
    keep_embeddings(embeddings, None, rows)
    embeddings += 1
    assert (rows.mm_input_embeds is None) if not pictures else rows.mm_input_embeds.eq(1).all()
