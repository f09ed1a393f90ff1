"""Promised users beside long prompts: what is compared with what."""

from promised_users import FIRST, PROMISED, compared

NAMES = ("tok_s", "gap_p50_ms", "gap_p99_ms", "promised_ms_per_token", "others_ms_per_token")


def test_ways_are_compared_with_the_first_round_by_round():
    def turn(kept, value):
        return {"kept": kept, **dict.fromkeys(NAMES, value)}

    found = compared({FIRST: [turn(0.5, 2.0), turn(0.0, 8.0)], PROMISED: [turn(1.0, 1.0), turn(0.5, 16.0)]})
    assert found[FIRST] == {"attainment": 0.25}
    assert found[PROMISED]["attainment"] == 0.75
    for name in NAMES:
        ratios = found[PROMISED]["ratios"][name]
        assert (ratios["ratio"], ratios["smallest"], ratios["largest"]) == (1.0, 0.5, 2.0)
