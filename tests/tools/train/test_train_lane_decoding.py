import pytest
import torch

from sglang_dspark.tools.train.decoding import decode
from sglang_dspark.tools.train.lane_decoding import LaneDecoder, affordable_lanes, lane_capacity, reason_against_lanes
from sglang_dspark.tools.train.target import Target
from sglang_dspark.tools.train.text_writer import InProcessWriter

GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [
    torch.randint(3, 64, (length,), generator=GENERATOR).tolist() for length in (3, 7, 2, 5, 5, 1, 9, 4, 6, 3, 8)
]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [2, 5, 16])
def test_lanes_write_the_same_greedy_texts_as_plain_decoding(lanes, target):
    expected = decode(target, PROMPTS, [0.0] * len(PROMPTS), 37, torch.Generator())
    # Some texts end early, so that lanes are filled again at different times.
    stopping = Target(target.model, target.tap_ids)
    stopping.stop_ids = frozenset({int(expected[0].input_ids[-20]), int(expected[3].input_ids[-30])})
    expected = decode(stopping, PROMPTS, [0.0] * len(PROMPTS), 37, torch.Generator())
    assert len({len(row.input_ids) - row.prompt_len for row in expected}) > 3
    decoder = LaneDecoder(stopping, lanes, lane_capacity(PROMPTS, 37))
    for _ in range(2):  # what the first texts left in the lanes does not matter
        written = decoder.decode(PROMPTS, [0.0] * len(PROMPTS), 37, torch.Generator())
        assert [row.input_ids.tolist() for row in written] == [row.input_ids.tolist() for row in expected]
        assert [row.prompt_len for row in written] == list(map(len, PROMPTS))


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_distribution_beside_greedy_ones(target):
    prompt, heat = PROMPTS[1], 0.7
    probs = torch.softmax(target.model(torch.tensor([prompt])).logits[0, -1] / heat, dim=-1)
    heats = [heat, 0.0] * 4000
    decoder = LaneDecoder(target, 500, lane_capacity([prompt], 1))
    written = decoder.decode([prompt] * 8000, heats, 1, torch.Generator().manual_seed(0))
    sampled, greedy = ([int(row.input_ids[-1]) for row in written[start::2]] for start in (0, 1))
    assert set(greedy) == {int(probs.argmax())}
    counts = torch.bincount(torch.tensor(sampled), minlength=64)
    # Half the L1 distance of 4000 draws to their own law is about 0.4 * sqrt(64 / 4000) = 0.05 at most.
    assert float((counts / 4000 - probs).abs().sum() / 2) < 0.06


def test_the_noise_follows_from_the_generator(target):
    decoder = LaneDecoder(target, 4, lane_capacity(PROMPTS, 12))

    def write(seed):
        generator = torch.Generator().manual_seed(seed)
        return [row.input_ids.tolist() for row in decoder.decode(PROMPTS, [1.0] * len(PROMPTS), 12, generator)]

    assert write(1) == write(1) != write(2)


def test_lanes_are_as_many_as_the_memory_holds(target):
    assert lane_capacity(PROMPTS, 37) == 64 and lane_capacity(PROMPTS, 56) == 128
    # 4 layers of 2 key/value heads of 8 float32 numbers, keys and values: 512 bytes a token; 12 for each of 64 logits.
    assert affordable_lanes(target, 100, 10 * (51200 + 768) * 10 // 4 + 1) == 10
    assert affordable_lanes(target, 100, 1) == 1


def test_targets_whose_attention_is_not_plain_are_left_to_the_other_decoder(target, monkeypatch):
    assert reason_against_lanes(target) is None
    monkeypatch.setattr(target.config, "layer_types", ["full_attention", "sliding_attention"])
    assert reason_against_lanes(target) == "it has layers of type sliding_attention"
    monkeypatch.setattr(target.config, "model_type", "gemma3")
    assert "gemma3 is not among llama" in reason_against_lanes(target)


def test_the_writer_keeps_its_lanes_while_they_fit(target, monkeypatch, caplog):
    writer = InProcessWriter(target)
    assert not writer._in_lanes  # on a CPU
    monkeypatch.setattr(writer, "_in_lanes", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    expected = decode(target, PROMPTS, [0.0] * len(PROMPTS), 37, torch.Generator())
    decoders = []
    for prompts, max_new_tokens in ((PROMPTS, 37), (PROMPTS[:3], 50), (PROMPTS * 2, 37), (PROMPTS, 200), (PROMPTS, 37)):
        written = writer.write(prompts, [0.0] * len(prompts), max_new_tokens, torch.Generator())
        decoders.append((writer._decoder, writer._decoder.num_lanes, writer._decoder.capacity))
        if max_new_tokens == 37:
            texts = [row.input_ids.tolist() for row in written[: len(PROMPTS)]]
            assert texts == [row.input_ids.tolist() for row in expected]
    assert [shape for _, *shape in decoders] == [[11, 64], [11, 64], [22, 64], [11, 256], [11, 64]]
    assert decoders[0][0] is decoders[1][0]


def test_a_target_that_cannot_be_decoded_in_lanes_is_named(target, monkeypatch, caplog):
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    assert InProcessWriter(target)._in_lanes
    assert not InProcessWriter(target, keep_states=True)._in_lanes
    monkeypatch.setattr(target.config, "model_type", "gemma3")
    assert not InProcessWriter(target)._in_lanes
    assert "step by step, which is slow on a GPU: gemma3 is not among" in caplog.text


def test_a_step_that_cannot_be_captured_runs_without_a_graph(target, monkeypatch, caplog):
    decoder = LaneDecoder(target, 2, 64)
    decoder._device = torch.device("cuda")

    def refuses():
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(decoder, "_captured", refuses)
    assert decoder._ready() == decoder._forward
    assert "(operation not permitted when stream is capturing); decoding is slower without" in caplog.text
