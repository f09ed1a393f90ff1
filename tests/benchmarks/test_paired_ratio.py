"""Paired ratios of a sweep."""

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from paired_ratio import frame_baselines, main, paired_ratios, ratios_to_each, spread_of, summarise
from scipy.stats import ttest_1samp
from serving.results import with_loads

from sglang_dspark.errors import ConfigError

DRIFT = [10.0, 40.0, 5.0, 80.0, 20.0, 60.0]


def sweep(ratios, *, concurrency=4):
    """Plain and static rounds on a machine whose speed drifts; static is ``ratios`` times as fast."""
    rows = []
    for index, (speed, ratio) in enumerate(zip(DRIFT, ratios, strict=False)):
        for config, policy, factor in (("p", "plain", 1.0), ("s", "static", ratio)):
            row = {"config": config, "policy": policy, "dtype": "float32", "concurrency": concurrency, "round": index}
            rows.append(row | {"output_tok_s": speed * factor, "versions": "x=1"})
    return with_loads(pd.DataFrame(rows))


def ratios_of(frame, **options):
    return paired_ratios(frame, "output_tok_s", frame_baselines(frame, **options))


def test_pairing_removes_the_drift():
    (row,) = summarise(ratios_of(sweep([1.1] * 6))).itertuples()
    assert (row.config, row.baseline, row.load, row.rounds, row.above) == ("s", "p", "4 users", 6, 6)
    assert (row.ratio, row.low, row.high) == pytest.approx((1.1, 1.1, 1.1))


def test_interval_is_that_of_the_mean_logarithm():
    ratios = [1.0, 1.2, 0.9, 1.5, 1.1, 1.3]
    interval = ttest_1samp(np.log(ratios), 0).confidence_interval(0.95)
    (row,) = summarise(ratios_of(sweep(ratios))).itertuples()
    assert row.ratio == pytest.approx(np.exp(np.log(ratios).mean()))
    assert (row.low, row.high) == pytest.approx((np.exp(interval.low), np.exp(interval.high)))
    assert (row.smallest, row.largest, row.above) == (pytest.approx(0.9), pytest.approx(1.5), 4)


def test_interval_covers_the_true_ratio_as_often_as_it_says_even_with_few_rounds():
    """1000 sweeps of 5 rounds: of 95 % intervals, 36 to 64 miss in all but one case in 25."""
    logs = np.random.default_rng(0).normal(0.2, 0.1, (1000, 5))
    pairs = pd.DataFrame({"config": "s", "baseline": "p", "load": np.repeat(np.arange(1000), 5)})
    summary = summarise(pairs.assign(ratio=np.exp(logs.ravel())))
    missed = 1000 - int(((summary["low"] <= np.exp(0.2)) & (np.exp(0.2) <= summary["high"])).sum())
    assert 36 <= missed <= 64


def test_command_prints_the_table(tmp_path):
    path = tmp_path / "sweep.csv"
    sweep([1.25] * 3).to_csv(path, index=False)
    result = CliRunner().invoke(main, [str(path)])
    assert result.exit_code == 0 and "1.25 (1.25 to 1.25)" in result.output and "3/3" in result.output


def test_one_configuration_against_each_of_the_others():
    slow, fast = sweep([0.8] * 6, concurrency=8), sweep([1.3] * 6, concurrency=1)
    ours = [part[part["config"] == "p"].assign(config="auto", policy="auto") for part in (slow, fast)]
    frame = pd.concat([slow, fast, *(part.assign(output_tok_s=part["output_tok_s"] * 1.1) for part in ours)])
    summary = summarise(ratios_to_each(frame, "output_tok_s", "auto"))
    assert set(summary["config"]) == {"auto"}
    assert summary[["load", "baseline"]].to_numpy().tolist() == [
        ["8 users", "p"], ["8 users", "s"], ["1 user", "p"], ["1 user", "s"]
    ]  # fmt: skip
    assert summary["ratio"].tolist() == pytest.approx([1.1, 1.1 / 0.8, 1.1, 1.1 / 1.3])
    for label, part in (("none", frame), ("auto", frame[frame["config"] == "auto"])):
        with pytest.raises(ConfigError, match=label):
            ratios_to_each(part, "output_tok_s", label)


def test_a_ratio_comes_with_its_spread_of():
    """JSON has no NaN for an interval of few rounds."""
    found = {"rounds": 2, "ratio": 1.0, "low": None, "high": None, "smallest": 0.5, "largest": 2.0}
    assert spread_of([2.0, 0.5]) == found
    of_four = spread_of([1.2, 1.3, 1.2, 1.3])
    assert 1.1 < of_four["low"] < of_four["ratio"] < of_four["high"] < 1.4
