"""A drafter fits or not, by how many of its first drafts are accepted, beside chance and its own promise."""

import numpy as np
import pytest

from sglang_dspark.scheduling.online_calibration import CHANCE, FEWEST, Fit, Verdict


@pytest.mark.parametrize(
    ("case", "share", "promised", "verdict"),
    [
        ("good", 0.7, 0.72, Verdict.FITS),
        ("hard texts, and the head knows it", 0.15, 0.2, Verdict.FITS),
        ("overconfident under a seed", 0.3, 0.75, Verdict.FITS),
        ("weak, without a head", 0.2, None, Verdict.FITS),
        ("random weights", 0.0, 0.5, Verdict.MISFIT),
        ("random weights, and the head promises nothing", 0.0, 0.01, Verdict.MISFIT),
        ("wrong taps", 0.08, 0.5, Verdict.MISFIT),
        ("wrong taps, without a head", 0.08, None, Verdict.MISFIT),
    ],
)
def test_verdicts(case, share, promised, verdict):
    fit = Fit(1000, round(1000 * share), promised)
    assert fit.verdict is verdict
    assert (fit.warning is not None) == (verdict is Verdict.MISFIT)


def test_nothing_is_said_of_few_drafts():
    assert Fit().verdict is Verdict.UNKNOWN
    assert Fit().report()["accepted"] is None
    assert Fit(FEWEST - 1, 0, 0.9).verdict is Verdict.UNKNOWN
    assert Fit(FEWEST, 0, 0.9).verdict is Verdict.MISFIT


def test_the_interval_holds():
    """One in a thousand drafters that are as good as chance looks worse than its interval allows."""
    accepted = np.random.default_rng(0).binomial(200, CHANCE, size=20_000)
    missed = np.mean([Fit(200, int(count)).most < CHANCE for count in accepted])
    assert missed < 0.003
    assert Fit(10_000, 500).most == pytest.approx(CHANCE, abs=0.008)


def test_the_warning_says_what_was_found():
    warning = Fit(200, 4, 0.61).warning
    assert "2.0% of 200 first drafts were accepted; its own confidence promised 61%" in warning
    assert Fit(200, 4).sentence == "2.0% of 200 first drafts were accepted"
