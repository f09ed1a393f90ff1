"""NaN of the drafter harms no text, and NaN of the target harms only its own request."""

import pytest
from stage_loop import StageLoop
from step_tables import make_table

NUM_TOKENS = 12
NAN = float("nan")
VOCAB_SIZE = 256
# Verifying a draft costs a tenth of a plain step, drafting another tenth.
TABLE = make_table(lambda r, d, c: 10 + d * r, lambda r, d, c: 1.0 * r, gamma=7)


def served(loop, num_tokens=NUM_TOKENS):
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
