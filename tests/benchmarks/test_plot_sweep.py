"""The figure of a sweep, and the page about it."""

import json
import re

import pandas as pd
import plot_sweep
import pytest
import report
from click.testing import CliRunner
from plot_sweep import draw
from serving.results import with_loads

RECORD = {
    "command": "python sweep.py <&>",
    "target": "target",
    "draft": "drafter",
    "prompts": [{"file": "set.jsonl"}],
    "sampling": {"max_tokens": 96, "temperature": 0.0},
    "hardware": {"cpu": "some CPU, 2 cores", "gpu": ""},
    "versions": {"sglang": "1"},
    "commit": "0123456789abcdef",
}
GAINS = {"plain@float32": (1.0, 1.0, 1.0), "static:7@float32": (2.0, 1.0, 0.5), "auto@float32": (2.0, 1.5, 1.1)}
USERS = (1, 4, 16)


def sweep():
    """Plain, a fixed length that loses at many users, and auto; the machine drifts from round to round."""
    rows = []
    for config, gains in GAINS.items():
        policy = re.match("[a-z]+", config).group()
        for users, gain in zip(USERS, gains, strict=True):
            for index, speed in enumerate((10.0, 30.0, 20.0)):
                counts = {"verified": 60, "decode_rounds": 20, "accepted": 15, "steps": 20, "plain_steps": 5}
                if policy == "plain":
                    counts = dict.fromkeys(counts)
                figures = {"output_tok_s": gain * speed * users, "per_user_tok_s": gain * speed, "accept_length": 1.75}
                figures |= {
                    "ttft_ms": 100.0,
                    "tpot_ms": 20.0,
                    "itl_p50_ms": 30.0,
                    "itl_p95_ms": 40.0,
                    "itl_p99_ms": 50.0,
                }
                row = {"config": config, "policy": policy, "concurrency": users, "round": index}
                row |= {"dtype": "float32", "timestamp": "2026-01-01T00:00:00+00:00"}
                rows.append(row | {"verify_len": 7 if policy == "static" else None} | figures | counts)
    return pd.DataFrame(rows)


def lines(axes):
    return {bar.get_label(): bar for bar in axes.containers}


def test_points_are_medians_with_the_range_as_bars():
    panel, _ = draw(with_loads(sweep()), RECORD).axes
    line, _, (bars,) = lines(panel)["plain"]
    assert line.get_ydata().tolist() == [20, 80, 320]
    assert line.get_xdata() == pytest.approx(USERS, rel=0.1)
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[10, 30], [40, 120], [160, 480]]
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {"plain", "static:7", "auto"}


def test_ratios_are_paired():
    _, panel = draw(with_loads(sweep()), RECORD).axes
    line, _, (bars,) = lines(panel)["static:7"]
    assert line.get_ydata() == pytest.approx([2, 1, 0.5])
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [pytest.approx([r, r]) for r in (2, 1, 0.5)]


def with_off(frame):
    """The same sweep with the plugin's steps without drafts, 1.25 times as fast as plain serving."""
    off = frame[frame["policy"] == "plain"].assign(config="off@float32", policy="off")
    return pd.concat([frame, off.assign(output_tok_s=1.25 * off["output_tok_s"])], ignore_index=True)


def test_two_ratios_never_mix():
    """Speculation is divided by off, and off by plain serving, each in a panel of its own."""
    _, plugin, speculation = draw(with_loads(with_off(sweep())), RECORD).axes
    assert "Without drafts: times plain SGLang" in plugin.get_title()
    assert set(lines(plugin)) == {"off"}
    assert lines(plugin)["off"][0].get_ydata() == pytest.approx([1.25] * 3)
    assert 'Speculation: times "off"' in speculation.get_title()
    assert set(lines(speculation)) == {"static:7", "auto"}
    assert lines(speculation)["auto"][0].get_ydata() == pytest.approx([2 / 1.25, 1.5 / 1.25, 1.1 / 1.25])
    _, mixed = draw(with_loads(sweep()), RECORD).axes
    assert mixed.get_title().startswith("Times plain SGLang")


@pytest.mark.slow
def test_report_has_all_parts(tmp_path):
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    (tmp_path / "provenance.json").write_text(json.dumps(RECORD))
    result = CliRunner().invoke(report.main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.md").read_text()
    assert f"]({plot_sweep.FILE})" in page and (tmp_path / plot_sweep.FILE).read_bytes().startswith(b"\x89PNG")
    for title in ("Speed", "Latency", "Speculation", "Where the numbers come from"):
        assert f"\n## {title}\n" in page
    assert "python sweep.py <&>" in page and "max_tokens 96" in page
    assert re.search(r"\| 1 user \| auto \| 40.0 \| - \| 40.0 \| - \| 2\.00 \| plain \| 2\.00 to 2\.00 \|", page)
