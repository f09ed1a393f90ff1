"""Prometheus metrics: every figure, its labels, and the dashboard's queries."""

import json
import math
import re
import threading
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from sglang_dspark.calibration.fit import Verdict
from sglang_dspark.calibration.predicted_survival import PredictedSurvival
from sglang_dspark.metrics.counters import Counters
from sglang_dspark.metrics.history import History
from sglang_dspark.metrics.prometheus import Metrics, State

GRAFANA = Path(__file__).parents[2] / "docker" / "grafana" / "dspark.json"
LABELS = {"model_name": "m", "tp_rank": 0}


class Exporter:
    def __init__(self):
        self.predicted = PredictedSurvival(3)
        self.counters = Counters(3, self.predicted)
        self.state = State(parked=False)
        self.registry = CollectorRegistry()
        history = History(self.counters)
        self.metrics = Metrics(self.counters, history, lambda: self.state, 16, LABELS, self.registry)

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"sglang:dspark_{name}", {"model_name": "m", "tp_rank": "0", **labels})


@pytest.fixture
def exporter():
    made = Exporter()
    made.counters.record([3, 3, 3], [3, 2, 0], [3, 1, 0], policy="auto")
    made.counters.record([0], [0], [0], policy="static", parked=True)
    made.counters.record_time(3, 40.0, 50.0)
    made.predicted.observe(np.full((3, 3), 0.75), np.array([3, 2, 0]), np.array([3, 1, 0]))
    return made


def test_counters_and_gauges(exporter):
    exporter.metrics.update()
    assert exporter.value("verified_tokens_total", load="4") == 5
    assert exporter.value("wasted_tokens_total", load="4") == 1
    assert exporter.value("request_steps_total", load="1") == exporter.value("parked_steps_total", load="1") == 1
    assert exporter.value("committed_tokens_total", load="4") == 7
    assert exporter.value("step_seconds_measured_total", load="4") == pytest.approx(0.04)
    assert exporter.value("policy_steps_total", policy="static") == 1
    assert [exporter.value("position_accepted_total", position=str(p)) for p in range(3)] == [2, 1, 1]
    assert [exporter.value("position_tested_total", position=str(p)) for p in range(3)] == [2, 2, 1]
    assert exporter.value("position_predicted_survival_total", position="1") == 1.5
    assert exporter.value("accept_length") == 2.0
    assert exporter.value("occupancy") == 2 / 16
    assert exporter.value("parked") == 0


def test_counters_follow_and_never_fall(exporter):
    exporter.metrics.update()
    exporter.metrics.update()
    assert exporter.value("steps_total", load="4") == 1
    exporter.counters.record([3, 3, 3], [1, 1, 1], [0, 0, 0], policy="auto")
    exporter.state = State(parked=True, fit=Verdict.MISFIT)
    exporter.metrics.update()
    assert exporter.value("steps_total", load="4") == 2
    assert exporter.value("parked") == 1
    assert exporter.value("drafter_misfit") == 1
    exporter.state = State(parked=True, fit=Verdict.FITS)
    exporter.metrics.update()
    assert exporter.value("drafter_misfit") == 0


def test_what_was_not_seen_is_a_gap():
    idle = Exporter()
    idle.metrics.update()
    assert math.isnan(idle.value("accept_length"))
    assert math.isnan(idle.value("drafter_misfit"))
    assert idle.value("tokens_per_second") == 0


def test_every_metric_of_the_dashboard_exists(exporter):
    exporter.metrics.update()
    exposed = {sample.name for family in exporter.registry.collect() for sample in family.samples}
    named = set(re.findall(r"sglang:dspark_\w+", GRAFANA.read_text()))
    assert len(named) > 10
    assert named - exposed == set()
    made = {name.removesuffix("_created") for name in exposed}
    assert {
        name.removeprefix("sglang:dspark_") for name in made - named - {n.removesuffix("_total") for n in named}
    } == {
        "accept_length",  # for those who draw one figure
        "drafter_misfit",  # for an alert
    }


def test_the_dashboard_tells_instances_apart():
    """Every query asks for the chosen instances, and one row of panels shows each alone."""
    board = json.loads(GRAFANA.read_text())
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["instance"]["multi"] and variables["instance"]["includeAll"]
    panels = board["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    selectors = [selector for query in queries for selector in re.findall(r"sglang:\w+(\{.*?\})", query)]
    assert len(selectors) == sum(query.count("sglang:") for query in queries) > 20
    assert set(selectors) == {'{model_name=~"$model", instance=~"$instance"}'}
    [row] = [index for index, panel in enumerate(panels) if panel["type"] == "row"]
    apart = [target for panel in panels[row + 1 :] for target in panel["targets"]]
    assert apart and all("by (instance)" in target["expr"] for target in apart)
    assert {target["legendFormat"] for target in apart} == {"{{instance}}"}
    # A last-minute figure of an idle instance is NaN, and so would the mean over all of them be.
    assert [query for query in queries if "avg" in query] == []


def test_metrics_outlive_a_full_disk(exporter, monkeypatch, caplog):
    """Those of several processes are files; what cannot be written now is written later."""
    monkeypatch.setattr("sglang_dspark.metrics.prometheus.PERIOD_S", 0.001)
    update, calls, again = exporter.metrics.update, [], threading.Event()

    def now_and_then():
        calls.append(len(calls))
        if len(calls) in (2, 3, 4):
            raise OSError(28, "No space left on device")
        update()
        if len(calls) > 5:
            again.set()

    monkeypatch.setattr(exporter.metrics, "update", now_and_then)
    exporter.metrics.start()
    assert again.wait(60)
    assert caplog.text.count("metrics cannot be updated") == 1
