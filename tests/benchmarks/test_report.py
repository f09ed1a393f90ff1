"""The figure of a sweep, and the page about it."""

import json
import re

import pandas as pd
import pytest
import report
from click.testing import CliRunner
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


def test_points_are_medians_with_the_range_as_bars():
    (panel,) = report.draw(with_loads(sweep())).axes
    line, _, (bars,) = {bar.get_label(): bar for bar in panel.containers}["plain"]
    assert line.get_xydata().tolist() == [[1, 20], [4, 80], [16, 320]]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[10, 30], [40, 120], [160, 480]]
    assert {text.get_text() for text in panel.get_legend().get_texts()} == {"plain", "static:7", "auto"}


@pytest.mark.slow
def test_report_has_all_parts(tmp_path):
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    (tmp_path / "provenance.json").write_text(json.dumps(RECORD))
    result = CliRunner().invoke(report.main, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    page = (tmp_path / "report.md").read_text()
    assert f"]({report.FIGURE})" in page and (tmp_path / report.FIGURE).read_bytes().startswith(b"\x89PNG")
    for title in ("Speed", "Latency", "Speculation", "Where the numbers come from"):
        assert f"\n## {title}\n" in page
    assert "python sweep.py <&>" in page and "max_tokens 96" in page
    assert re.search(r"\| 1 user \| auto \| 40.0 \| - \| 40.0 \| - \| 2\.00 \| plain \| 2\.00 to 2\.00 \|", page)
