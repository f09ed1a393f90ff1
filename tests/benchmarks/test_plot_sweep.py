"""Figures of a sweep, and the page about it."""

import json
import re

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import report
from click.testing import CliRunner
from figures.latency import goodput_vs_load, latency_vs_rate
from figures.style import DARK, LIGHT, caption, end_labels, spread_out, styles
from figures.throughput import crossover_text, throughput_vs_concurrency, throughput_vs_user_speed
from figures.verification import verification_vs_concurrency, waste_vs_load
from matplotlib.figure import Figure
from plot_sweep import drawings, main
from serving.frontier import crossovers, pareto, user_ratios
from serving.results import complete, read_sweep

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


def open_loop():
    """The same sweep with arrivals, occupancy and a promise."""
    closed = sweep().assign(rate=np.nan)
    opened = closed.assign(rate=closed["concurrency"] / 2.0, concurrency=np.nan)
    kept = {"sla_ttft_ms": 500.0, "sla_tpot_ms": np.nan, "sla_met_share": 0.9, "goodput_req_s": 1.0, "goodput_tok_s": 9}
    frame = pd.concat([closed, opened], ignore_index=True).assign(**kept, ttft_p95_ms=200.0, tpot_p95_ms=30.0)
    return frame.assign(in_flight=frame["concurrency"].fillna(3.0) * 0.9)


def lines(axes):
    return {bar.get_label(): bar for bar in axes.containers}


def test_points_are_medians_with_the_range_as_bars():
    panel, _ = throughput_vs_concurrency(complete(sweep())).axes
    line, _, (bars,) = lines(panel)["plain@float32"]
    assert line.get_ydata().tolist() == [20, 80, 320]
    assert line.get_xdata() == pytest.approx(USERS, rel=0.1)
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[10, 30], [40, 120], [160, 480]]
    assert {text.get_text() for text in panel.texts} == {"plain", "static:7", "auto"}


def test_ratios_are_paired_and_the_crossover_is_marked():
    _, panel = throughput_vs_concurrency(complete(sweep())).axes
    assert lines(panel)["static:7@float32"][0].get_ydata() == pytest.approx([2, 1, 0.5])
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


def test_words_about_the_crossover():
    def text(*gains):
        frame = complete(sweep())
        frame.loc[frame["policy"] == "static", "output_tok_s"] *= frame["concurrency"].map(
            dict(zip(USERS, gains, strict=True))
        )
        frame = frame[frame["policy"] != "auto"]
        return crossover_text(frame, crossovers(user_ratios(frame, {"static:7@float32": "plain@float32"})), "plain")

    assert text(1, 1, 1) == "✖ plain overtakes static:7 beyond about 4 users (interpolated)"
    assert text(0.4, 0.8, 1) == "behind plain from the start: static:7"
    assert text(1, 1, 4) == "No crossover: all are ahead of plain at 16 users"
    assert crossover_text(complete(sweep()), [], "plain") == ""


def with_off(frame):
    """The same sweep with the plugin's steps without drafts, 1.25 times as fast as plain serving."""
    off = frame[frame["policy"] == "plain"].assign(config="off@float32", policy="off")
    return pd.concat([frame, off.assign(output_tok_s=1.25 * off["output_tok_s"])], ignore_index=True)


def test_two_ratios_never_mix():
    """What speculates is divided by off, and off by plain serving, each in a panel of its own."""
    _, plugin, speculation = throughput_vs_concurrency(complete(with_off(sweep()))).axes
    assert "Without drafts: times plain SGLang" in plugin.get_title()
    assert set(lines(plugin)) == {"off@float32"}
    assert lines(plugin)["off@float32"][0].get_ydata() == pytest.approx([1.25] * 3)
    assert 'Speculation: times "off"' in speculation.get_title()
    assert set(lines(speculation)) == {"static:7@float32", "auto@float32"}
    assert lines(speculation)["auto@float32"][0].get_ydata() == pytest.approx([2 / 1.25, 1.5 / 1.25, 1.1 / 1.25])
    assert any("off overtakes static:7" in text.get_text() for text in speculation.texts)
    _, mixed = throughput_vs_concurrency(complete(sweep())).axes
    assert "the plugin's own step and speculation in one" in mixed.get_title()


def test_report_names_both_parts_of_a_gain(tmp_path):
    path = tmp_path / "sweep.csv"
    with_off(sweep()).to_csv(path, index=False)
    sentences = " ".join(report.findings(read_sweep(path)))
    assert "off delivers, in times of plain serving: 1.25 (1.25 to 1.25) at 1 user" in sentences
    assert "auto delivers, in times of the plugin without drafts (speculation alone): 1.60 (1.60 to 1.60)" in sentences
    assert "Slower than off in every round: static:7 at 4 users, static:7 at 16 users, auto at 16 users" in sentences
    assert "cannot be told apart" not in sentences
    sweep().to_csv(path, index=False)
    assert "`off` was not measured" in " ".join(report.findings(read_sweep(path)))


def test_pareto_frontier_holds_what_nothing_beats():
    points = [(1, 5), (2, 4), (2, 5), (3, 3), (1, 1), (3, 3), (4, 0)]
    assert [points[index] for index in pareto(points)] == [(2, 5), (3, 3), (4, 0)]
    random = np.random.default_rng(0).random((60, 2))
    frontier = pareto([tuple(point) for point in random])
    for index, point in enumerate(random):
        beaten = any((other >= point).all() and (other > point).any() for other in random)
        assert (index in frontier) == (not beaten)
    assert pareto([]) == []


def test_user_speed_is_the_other_axis_and_the_frontier_names_its_users():
    (axes,) = throughput_vs_user_speed(complete(sweep())).axes
    by_label = {line.get_label(): line for line in axes.lines}
    assert by_label["static:7"].get_xydata().tolist() == [[40, 40], [20, 80], [10, 160]]
    frontier = by_label["Pareto frontier"].get_xydata()[1:-1].tolist()
    assert frontier == [[22, 352], [30, 120], [40, 40]]
    texts = [text.get_text() for text in axes.texts]
    assert texts[:3] == ["16 users", "4 users", "1 user"]


def test_verification_and_waste_are_shown_for_what_speculates():
    frame = complete(sweep())
    panels = verification_vs_concurrency(frame).axes
    heights = [{line.get_label(): line.get_ydata().tolist() for line in axes.lines} for axes in panels]
    assert [set(panel) for panel in heights] == 3 * [{"static:7@float32", "auto@float32"}]
    assert [panel["auto@float32"] for panel in heights] == [[3.0] * 3, [1.75] * 3, [0.25] * 3]
    (axes,) = waste_vs_load(frame).axes
    assert axes.lines[0].get_xydata().tolist() == [[users, 0.75] for users in USERS]
    assert "users" in axes.get_xlabel()


def test_waste_is_drawn_over_the_measured_occupancy_of_both_loops():
    (axes,) = waste_vs_load(complete(open_loop())).axes
    assert "on average" in axes.get_xlabel()
    assert axes.lines[0].get_xdata() == pytest.approx([0.9, 2.7, 2.7, 2.7, 3.6, 14.4])


def test_open_loop_and_goodput_have_figures_of_their_own():
    frame = complete(open_loop())
    ttft, tpot = latency_vs_rate(frame).axes
    assert lines(ttft)["auto@float32"][0].get_xydata().tolist() == [[0.5, 200], [2, 200], [8, 200]]
    assert lines(tpot)["auto@float32"][0].get_ydata().tolist() == [30] * 3
    closed, opened = goodput_vs_load(frame).axes
    assert "first token within 500 ms" in closed.get_title() and "further" not in closed.get_title()
    assert [len(lines(axes)["auto@float32"][0].get_xdata()) for axes in (closed, opened)] == [3, 3]
    assert len(list(drawings(frame))) == 6


def test_figures_without_data_are_left_out():
    plain = complete(sweep()[lambda frame: frame["policy"] == "plain"])
    assert [draw.__name__ for draw in drawings(plain)] == ["throughput_vs_concurrency", "throughput_vs_user_speed"]
    only_open = complete(open_loop()[lambda frame: frame["concurrency"].isna()])
    assert [draw.__name__ for draw in drawings(only_open)] == ["waste_vs_load", "latency_vs_rate", "goodput_vs_load"]


def test_labels_keep_their_distance_and_stay_near():
    assert spread_out([0.1, 0.5, 0.9], 0.05) == pytest.approx([0.1, 0.5, 0.9])
    assert spread_out([0.5, 0.5, 0.5], 0.1) == pytest.approx([0.4, 0.5, 0.6])
    assert spread_out([0.1, 0.5, 0.51], 0.1) == pytest.approx([0.1, 0.455, 0.555])
    top = spread_out([0.98, 0.99, 1.0], 0.1)
    assert top == pytest.approx([0.8, 0.9, 1.0])


def test_configurations_keep_their_looks_on_both_grounds():
    for look in (LIGHT, DARK):
        with mpl.rc_context(look):
            found = styles(complete(sweep()))
        assert found["plain@float32"]["linestyle"] == "--" and found["plain@float32"]["color"] == look["text.color"]
        assert len({str(style["color"]) for style in found.values()}) == 3


def test_caption_says_what_was_measured_and_where():
    text = caption(complete(sweep()))
    for part in ("target, float32 on some CPU, 2 cores", "set.jsonl", "3 rounds", "sglang=1", "commit 0123456789ab"):
        assert part in text
    assert caption(complete(sweep().assign(model=np.nan))).startswith("a model served elsewhere, float32 on")


@pytest.mark.slow
def test_command_writes_all_figures(tmp_path):
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    result = CliRunner().invoke(main, [str(tmp_path / "sweep.csv")])
    assert result.exit_code == 0, result.output
    names = ("throughput_vs_concurrency", "throughput_vs_user_speed", "verification_vs_concurrency", "waste_vs_load")
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_report_has_all_parts_and_loads_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DPI", 30)
    open_loop().to_csv(tmp_path / "sweep.csv", index=False)
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
    page = (tmp_path / "report.html").read_text()
    for name, text in report.HOW_TO_READ.items():
        assert f'id="{name}"' in page and text[:40] in page
    assert page.count("data:image/png;base64,") == 2 * len(report.HOW_TO_READ)
    for title in ("Speed", "Latency", "Speculation", "Goodput", "Texts", "Where the numbers come from"):
        assert f">{title}</h2>" in page
    assert "python sweep.py &lt;&amp;&gt;" in page and "max_tokens 96" in page and "7 of 8" in page
    assert "auto delivers, in times of plain serving: 2.00 (2.00 to 2.00) at 1 user" in page
    assert "Slower than plain in every round: static:7 at 16 users" in page
    assert "static:7 beyond about 4 users" in page and "3 rounds are too few" in page
    assert not re.findall(r'(?:src|srcset|href)="(?!data:|#)', page)
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


@pytest.mark.slow
def test_report_of_an_older_file_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DPI", 30)
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    old = {"config": "auto", "baseline": "plain", "identical": 1, "compared": 2}
    entries = [old | {"concurrency": 4, "baseline_concurrency": 4}, old | {"concurrency": 4, "baseline_concurrency": 1}]
    (tmp_path / "agreement.json").write_text(json.dumps({"agreements": entries}))
    page = report.render(tmp_path)
    missing = page.split("measured before these columns existed")[1].split("</p>")[0]
    assert "goodput_tok_s" in missing and "in_flight" in missing and "ttft_ms" not in missing.split(", ")
    assert ">Goodput</h2>" not in page
    assert page.count("1 of 2") == 1  # the other entry compared unequal prompts


@pytest.mark.slow
def test_report_of_simulated_acceptance_is_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DPI", 30)
    sweep().to_csv(tmp_path / "sweep.csv", index=False)
    entry = {"config": "auto", "load": "1 user", "baseline": "plain", "baseline_load": "1 user"}
    (tmp_path / "agreement.json").write_text(json.dumps({"agreements": [entry | {"identical": 7, "compared": 8}]}))
    for flags, marked in (("", False), ("--speculative-dspark-simulate-acceptance 0.8", True)):
        (tmp_path / "provenance.json").write_text(json.dumps({"command": f'sweep.py --config "auto {flags}"'}))
        page = report.render(tmp_path)
        assert ("Step-time results" in page) == marked
        assert ("7 of 8" in page) != marked


def test_folder_without_a_sweep_is_refused(tmp_path):
    result = CliRunner().invoke(report.main, [str(tmp_path)])
    assert result.exit_code == 1 and "no sweep.csv" in result.output


def test_lines_that_end_in_one_point_share_a_label():
    def labels(*ends):
        axes = Figure().subplots()
        axes.set_ylim(0, 1)
        end_labels(axes, [(height, text, "k") for height, text in ends])
        return {text.get_text() for text in axes.texts}

    assert labels((0.5, "a"), (0.5, "b")) == {"all"}
    assert labels((0.5, "a"), (0.5, "b"), (0.7, "c")) == {"a,\nb", "c"}
    assert labels(*((0.5, name) for name in "abcd"), (0.7, "e")) == {"4 others", "e"}
