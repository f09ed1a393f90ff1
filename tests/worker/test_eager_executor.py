"""The served stages without a server: what the golden pair drafts, accepts and writes, whatever fails in it."""

import pytest
from dspark_kernels import kernels_anywhere
from stage_loop import StageLoop
from step_tables import make_table

from sglang_dspark.draft.backbone import DraftWindow

NUM_TOKENS = 24
# Verifying a draft costs a tenth of a plain step, drafting another tenth.
TABLE = make_table(lambda r, d, c: 10 + d * r, lambda r, d, c: 1.0 * r, gamma=7)


def prompts_of(loop: StageLoop) -> list[list[int]]:
    return [case.prompt_ids for case in loop.golden.cases]


def test_the_golden_rounds_are_decoded_in_one_batch():
    """Requests of different lengths side by side: drafts, accepted counts and texts of the checkpoint's own code."""
    loop = StageLoop(schedule="static")
    outputs = loop.serve(prompts_of(loop), NUM_TOKENS)
    compared = 0
    for case, output, trace in zip(loop.golden.cases, outputs, loop.traces, strict=True):
        length = min(NUM_TOKENS, len(case.output_ids))
        assert output[:length] == case.output_ids[:length]
        for expected, got in zip(case.rounds, trace, strict=False):
            if loop.golden.ends_at_limit(case, expected) or got[0] + loop.gamma >= len(case.prompt_ids) + length:
                break
            assert got == (expected.start, expected.anchor, expected.draft, expected.accepted)
            compared += 1
    assert compared > 10


@pytest.mark.slow
def test_kernels_decode_the_golden_rounds():
    """The stages as on a GPU, under Triton's interpreter: laid out, drafted, judged and committed by kernels."""
    loop = StageLoop(schedule="static")
    case = loop.golden.cases[0]
    with kernels_anywhere():
        (output,) = loop.serve(prompts_of(loop)[:1], 8)
    assert output[:8] == case.output_ids[:8]
    rounds = list(zip(case.rounds, loop.traces[0], strict=False))
    assert len(rounds) > 1
    for expected, got in rounds[:-1]:
        assert got == (expected.start, expected.anchor, expected.draft, expected.accepted)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "off"},
        {"schedule": "static", "verify_len": 1},
        {"schedule": "threshold", "confidence_threshold": 0.5},
        {"schedule": "early-stop"},
        {},
    ],
    ids=lambda options: options.get("schedule", "auto"),
)
def test_greedy_text_is_the_same_under_every_policy(options):
    loop = StageLoop(TABLE, **options)
    expected = [case.output_ids[:NUM_TOKENS] for case in loop.golden.cases]
    outputs = loop.serve(prompts_of(loop), NUM_TOKENS)
    assert [output[: len(text)] for output, text in zip(outputs, expected, strict=True)] == expected


def test_seeded_text_is_the_same_whatever_is_verified():
    texts = []
    for verify_len in (0, 2, 7):
        loop = StageLoop(schedule="static", verify_len=verify_len)
        texts.append(loop.serve(prompts_of(loop)[:3], 10, temperature=1.0, seeds=range(3)))
    assert texts[0] == texts[1] == texts[2]
    greedy = [case.output_ids[:10] for case in loop.golden.cases[:3]]
    assert [text[: len(expected)] for text, expected in zip(texts[0], greedy, strict=True)] != greedy


def served_within(window):
    """Texts and traces of two golden prompts."""
    loop = StageLoop(schedule="static")
    loop.drafter.window = window
    prompts = [case.prompt_ids for case in loop.golden.cases[:2]]
    return loop.serve(prompts, 10), loop.traces


@pytest.fixture(scope="module")
def whole():
    return served_within(None)


def test_a_window_of_the_whole_context_changes_nothing(whole):
    assert served_within(DraftWindow(500, 4)) == whole


def test_a_narrow_window_changes_drafts_alone(whole):
    texts, traces = served_within(DraftWindow(3, 1))
    assert texts == whole[0]
    assert traces != whole[1]


NAN = float("nan")
VOCAB_SIZE = 256
# Verifying a draft costs a tenth of a plain step, drafting another tenth.


def served(loop, num_tokens=12):
    """Texts of the golden prompts, and those of the target alone."""
    cases = loop.golden.cases
    outputs = loop.serve([case.prompt_ids for case in cases], num_tokens)
    expected = [case.output_ids[:num_tokens] for case in cases]
    return [output[: len(text)] for output, text in zip(outputs, expected, strict=True)], expected


POLICIES = [{"schedule": "early-stop"}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("options", POLICIES, ids=lambda options: options.get("schedule", "auto"))
@pytest.mark.parametrize("part", ["drafter", "confidence head"])
def test_a_broken_drafter_costs_time_and_no_text(options, part):
    """And nothing is learned from it."""
    loop = StageLoop(TABLE, **options)
    model = loop.drafter.model
    for parameter in (model if part == "drafter" else model.confidence_head).parameters():
        parameter.data.fill_(NAN)
    outputs, expected = served(loop)
    assert outputs == expected
    assert set(loop.schedule.report()["calibration"]["pairs"]) == {0}


def test_nan_of_the_target_stays_with_its_request():
    loop = StageLoop(schedule="static")
    verify = loop._verify

    def broken(step, plan):
        output = verify(step, plan)
        start, stop = plan.indptr[:2].tolist()
        output.logits_output.next_token_logits[start:stop] = NAN
        return output

    loop.eager.forward = broken
    outputs, expected = served(loop)
    assert outputs[0] != expected[0]
    assert outputs[1:] == expected[1:]
    assert all(0 <= token < VOCAB_SIZE for token in outputs[0])
