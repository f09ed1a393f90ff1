"""The figure of a sweep, and the page about it."""

import json
import re

import numpy as np
import pandas as pd
import plot_sweep
import pytest
import report
from click.testing import CliRunner
from plot_sweep import draw
from serving.crossovers import crossovers, user_ratios
from serving.results import complete

ORIGIN = {
    "model": "target",
    "draft": "drafter",
    "prompt_set": "set.jsonl",
    "num_requests": 8,
    "cpu": "some CPU, 2 cores",
    "gpu": np.nan,
    "versions": "sglang=1",
    "commit": "0123456789abcdef",
    "timestamp": "2026-01-01T00:00:00+00:00",
    "dtype": "float32",
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
                rows.append(row | {"verify_len": 7 if policy == "static" else None} | figures | ORIGIN | counts)
    return pd.DataFrame(rows)


def arrivals():
    """The same sweep with arrivals by chance and a promise."""
    kept = {"sla_ttft_ms": 500.0, "sla_tpot_ms": np.nan, "sla_met_share": 0.9, "goodput_req_s": 1.0, "goodput_tok_s": 9}
    return sweep().assign(rate=sweep()["concurrency"] / 2.0, concurrency=np.nan, **kept)


def lines(axes):
    return {bar.get_label(): bar for bar in axes.containers}


def test_points_are_medians_with_the_range_as_bars():
    panel, _ = draw(complete(sweep())).axes
    line, _, (bars,) = lines(panel)["plain"]
    assert line.get_ydata().tolist() == [20, 80, 320]
    assert line.get_xdata() == pytest.approx(USERS, rel=0.1)
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[10, 30], [40, 120], [160, 480]]
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {"plain", "static:7", "auto"}


def test_ratios_are_paired_and_the_crossover_is_marked():
    _, panel = draw(complete(sweep())).axes
    assert lines(panel)["static:7"][0].get_ydata() == pytest.approx([2, 1, 0.5])
    (text,) = (text.get_text() for text in panel.texts if "plain overtakes" in text.get_text())
    assert "static:7 beyond about 4 users" in text and "auto" not in text
    (cross,) = (line for line in panel.lines if line.get_marker() == "X")
    assert [*cross.get_xdata(), *cross.get_ydata()] == pytest.approx([4, 1])


def test_crossover_is_interpolated_between_doublings_of_users():
    frame = complete(sweep())
    ratios = user_ratios(frame, {"static:7@float32": "plain@float32", "plain@float32": "plain@float32"})
    assert ratios["ratio"].tolist() == pytest.approx([2, 1, 0.5])
    assert ratios["low"].tolist() == ratios["high"].tolist() == pytest.approx([2, 1, 0.5])

    def crossing(*gains, policy="static"):
        table = pd.DataFrame({"config": "s", "policy": policy, "concurrency": USERS, "ratio": gains})
        return [found.users for found in crossovers(table)]

    assert crossing(2.0, 2.0, 0.5) == [pytest.approx(8)]  # half way between 4 and 16 in doublings
    assert crossing(2.0, 0.5, 0.5) == [pytest.approx(2)]
    assert crossing(0.5, 2.0, 0.5) == [pytest.approx(8)]  # for good: what counts is the last time
    assert crossing(2.0, 0.5, 2.0) == [None] == crossing(0.9, 0.8, 0.7) == crossing(2.0, 2.0, 1.0)
    assert crossing(2.0, 0.5, 0.5, policy="off") == []


def with_off(frame):
    """The same sweep with the plugin's steps without drafts, 1.25 times as fast as plain serving."""
    off = frame[frame["policy"] == "plain"].assign(config="off@float32", policy="off")
    return pd.concat([frame, off.assign(output_tok_s=1.25 * off["output_tok_s"])], ignore_index=True)


def test_two_ratios_never_mix():
    """Speculation is divided by off, and off by plain serving, each in a panel of its own."""
    _, plugin, speculation = draw(complete(with_off(sweep()))).axes
    assert "Without drafts: times plain SGLang" in plugin.get_title()
    assert set(lines(plugin)) == {"off"}
    assert lines(plugin)["off"][0].get_ydata() == pytest.approx([1.25] * 3)
    assert 'Speculation: times "off"' in speculation.get_title()
    assert set(lines(speculation)) == {"static:7", "auto"}
    assert lines(speculation)["auto"][0].get_ydata() == pytest.approx([2 / 1.25, 1.5 / 1.25, 1.1 / 1.25])
    assert any("off overtakes static:7" in text.get_text() for text in speculation.texts)
    _, mixed = draw(complete(sweep())).axes
    assert "the plugin's own step and speculation in one" in mixed.get_title()


@pytest.mark.slow
def test_command_draws_beside_the_sweep(tmp_path):
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    result = CliRunner().invoke(plot_sweep.main, [str(tmp_path / "sweep.csv")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / plot_sweep.FILE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_report_has_all_parts(tmp_path):
    pd.concat([sweep(), arrivals()]).to_csv(tmp_path / "sweep.csv", index=False)
    record = {"command": "python sweep.py <&>", "sampling": {"max_tokens": 96}}
    (tmp_path / "provenance.json").write_text(json.dumps(record))
    entry = {
        "config": "auto",
        "load": "1 user",
        "baseline": "plain",
        "baseline_load": "1 user",
        "identical": 7,
        "compared": 8,
    }
    (tmp_path / "agreement.json").write_text(json.dumps({"agreements": [entry]}))
    result = CliRunner().invoke(report.main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.md").read_text()
    assert f"]({plot_sweep.FILE})" in page and (tmp_path / plot_sweep.FILE).exists()
    for title in ("Speed", "Latency", "Speculation", "Goodput", "Texts", "Where the numbers come from"):
        assert f"\n## {title}\n" in page
    assert "python sweep.py <&>" in page and "max_tokens 96" in page and "7 of 8" in page
    assert "first token within 500 ms" in page and "further" not in page.split("## Goodput")[1].split("|")[0]
    assert re.search(r"\| 1 user \| auto \| 40 \| 40 \| - \| 2\.00 \| plain \| 2\.00 to 2\.00 \|", page)
