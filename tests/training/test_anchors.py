import torch
from dspark_training.anchors import collate, sample_anchors
from dspark_training.texts import StoredText, states_of


def make_row(row_len: int, prompt_len: int) -> StoredText:
    generator = torch.Generator().manual_seed(row_len)
    return StoredText(
        torch.randint(3, 64, (row_len,), generator=generator),
        prompt_len,
        torch.randn(row_len, 64, generator=generator),
        torch.randn(row_len, 32, generator=generator),
    )


def test_anchors_and_their_first_label_are_answer_tokens():
    row = make_row(30, 12)
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(50):
        anchors = sample_anchors(row, 5, generator).tolist()
        assert anchors == sorted(set(anchors)) and len(anchors) == 5
        seen |= set(anchors)
    assert seen == set(range(12, 29))


def test_short_answers_give_fewer_anchors():
    assert len(sample_anchors(make_row(14, 12), 5, torch.Generator())) == 1
    assert len(sample_anchors(make_row(13, 12), 5, torch.Generator())) == 0


def test_batch_reads_labels_and_target_states_at_the_right_positions():
    rows = [make_row(20, 8), make_row(11, 6)]
    anchors = [torch.tensor([8, 15, 18]), torch.tensor([9])]
    batch = collate(rows, anchors, states_of(None, rows), 4)
    assert batch.supervised.tolist() == [
        [[True] * 4, [True] * 4, [True, False, False, False]],
        [[True, False, False, False], [False] * 4, [False] * 4],
    ]
    assert torch.equal(batch.labels[0, 1], rows[0].input_ids[16:20])
    # The second block's slots are flat 4 to 7, all of them supervised.
    assert batch.slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 12]
    assert torch.equal(batch.target_hidden[4:8], rows[0].last_hidden[15:19])
    assert int(batch.anchor_ids[1, 0]) == int(rows[1].input_ids[9])
    assert torch.equal(batch.prev_ids[0, 1], rows[0].input_ids[15:19])
