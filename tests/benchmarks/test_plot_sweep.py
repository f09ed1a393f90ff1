"""Figures of a sweep."""

import numpy as np
import pandas as pd
from click.testing import CliRunner
from plot_sweep import (
    caption,
    main,
    throughput_vs_concurrency,
    throughput_vs_user_speed,
    verification_vs_concurrency,
)

ORIGIN = {
    "model": "target",
    "prompt_set": "set.jsonl",
    "num_requests": 8,
    "cpu": "some CPU, 2 cores",
    "gpu": np.nan,
    "versions": "sglang=1",
    "commit": "0123456789abcdef",
}


def sweep():
    rows = []
    for config, policy in (("plain@float32", "plain"), ("static:7@float32", "static")):
        for concurrency in (1, 4):
            for index, speed in enumerate((10.0, 30.0, 20.0)):
                row = {"config": config, "policy": policy, "concurrency": concurrency, "round": index}
                counts = {"verified": 60, "decode_rounds": 20, "accepted": 15, "steps": 20, "plain_steps": 5}
                rows.append(row | {"output_tok_s": speed * concurrency, "per_user_tok_s": speed} | ORIGIN | counts)
    return pd.DataFrame(rows)


def test_points_are_medians_with_the_range_as_bars():
    (axes,) = throughput_vs_concurrency(sweep()).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["plain@float32", "static:7@float32"]
    line, _, (bars,) = axes.containers[0]
    assert line.get_xydata().tolist() == [[1, 20], [4, 80]]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[10, 30], [40, 120]]


def test_user_speed_is_the_other_axis_and_points_name_the_concurrency():
    (axes,) = throughput_vs_user_speed(sweep()).axes
    assert axes.containers[1][0].get_xydata().tolist() == [[20, 20], [20, 80]]
    assert [text.get_text() for text in axes.texts] == ["1", "4", "1", "4"]


def test_verification_is_shown_for_what_speculates():
    panels = verification_vs_concurrency(sweep()).axes
    assert [text.get_text() for text in panels[1].get_legend().get_texts()] == ["static:7@float32"]
    lengths, plain, wasted = ([line.get_xydata().tolist() for line in axes.lines] for axes in panels)
    assert lengths == [[[1, 3.0], [4, 3.0]]]
    assert plain == [[[1, 0.25], [4, 0.25]]]
    assert wasted == [[[1, 0.75], [4, 0.75]]]


def test_caption_says_what_was_measured_and_where():
    text = caption(sweep())
    for part in ("target on some CPU, 2 cores", "set.jsonl", "3 rounds", "sglang=1", "commit 0123456789ab"):
        assert part in text


def test_command_writes_all_figures(tmp_path):
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    result = CliRunner().invoke(main, [str(tmp_path / "sweep.csv")])
    assert result.exit_code == 0, result.output
    for name in ("throughput_vs_concurrency", "throughput_vs_user_speed", "verification_vs_concurrency"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
