"""Tests of Prometheus metrics and the dashboard's queries, and of what answers tell about their drafts."""

import json
import math
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dspark_kernels import ASKED_ROWS, CACHED_ROWS
from prometheus_client import CollectorRegistry
from sglang_objects import request

from sglang_dspark.engine.part import Counted
from sglang_dspark.features.reports import prometheus
from sglang_dspark.features.reports.counters import Counters, Versions
from sglang_dspark.features.reports.prometheus import Metrics
from sglang_dspark.features.reports.traces import count_drafts, trace_step
from sglang_dspark.scheduling.online_calibration import PredictedSurvival
from sglang_dspark.step.decision import StepDecision, StepRecord, TimedStep
from sglang_dspark.step.selection import FixedLength

GRAFANA = Path(__file__).parents[2] / "docker" / "grafana" / "dspark.json"
LABELS = {"model_name": "m", "tp_rank": 0}


class Exporter:
    def __init__(self):
        self.predicted = PredictedSurvival(3)
        self.counters = Counters(3, self.predicted)
        self.versions = Versions(("v1", "d"))
        self.registry = CollectorRegistry()
        counted = [
            Counted("slos", {"met": 2}, "outcome", "Of a feature."),
            Counted("failed_advice", {}, "advice", "Of all."),
            Counted("steps_by_policy", self.counters.steps_by_policy),
        ]
        self.metrics = Metrics(self.counters, self.versions, LABELS, lambda: counted, self.registry)

    def value(self, name, **labels):
        return self.registry.get_sample_value(f"sglang:dspark_{name}", {"model_name": "m", "tp_rank": "0", **labels})


@pytest.fixture
def exporter():
    made = Exporter()
    made.counters.record([3, 3, 3], [3, 2, 0], [3, 1, 0], policy="auto")
    made.counters.record([0], [0], [0], policy="static", parked=True)
    made.counters.record_time(TimedStep(3, 40.0, 50.0))
    made.predicted.observe(np.full((3, 3), 0.75), np.array([3, 2, 0]), np.array([3, 1, 0]))
    return made


def test_counters(exporter):
    exporter.metrics.update()
    assert exporter.value("verified_tokens_total", load="4") == 5
    assert exporter.value("request_steps_total", load="1") == exporter.value("parked_steps_total", load="1") == 1
    assert exporter.value("committed_tokens_total", load="4") == 7
    assert exporter.value("step_seconds_measured_total", load="4") == pytest.approx(0.04)
    assert exporter.value("slos_total", outcome="met") == 2
    assert [exporter.value("position_accepted_total", position=str(p)) for p in range(3)] == [2, 1, 1]
    assert exporter.value("position_predicted_survival_total", position="1") == 1.5
    assert exporter.value("timed_steps_total", load="4") == 1


def test_counters_follow_and_never_fall(exporter):
    exporter.metrics.update()
    exporter.metrics.update()
    assert exporter.value("steps_total", load="4") == 1
    exporter.counters.record([3, 3, 3], [1, 1, 1], [0, 0, 0], policy="auto")
    exporter.metrics.update()
    assert exporter.value("steps_total", load="4") == 2


def test_a_drafter_that_is_not_judged_yet_is_a_gap(exporter):
    values = []
    for accepted in (None, 0, 70):
        if accepted is not None:
            exporter.versions.first_drafts |= {"verified": 80, "accepted": accepted}
        exporter.metrics.update()
        values.append(exporter.value("drafter_misfit"))
    assert math.isnan(values[0])
    assert values[1:] == [1, 0]


def test_every_metric_of_the_dashboard_exists(exporter):
    exporter.metrics.update()
    families = {family.name for family in exporter.registry.collect()}
    shown = {name.removesuffix("_total") for name in re.findall(r"sglang:dspark_\w+", GRAFANA.read_text())}
    # Not in panels: what alerts are for.
    assert families - shown == {"sglang:dspark_drafter_misfit", "sglang:dspark_failed_advice"}
    assert shown - families == set() and len(families) == 20


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


def test_metrics_outlive_a_full_disk(exporter, monkeypatch, caplog):
    """Those of several processes are files; what cannot be written now is written later."""
    monkeypatch.setattr(prometheus, "PERIOD_S", 0.001)
    update, calls, again = exporter.metrics.update, [], threading.Event()

    def now_and_then():
        calls.append(len(calls))
        if len(calls) in (2, 3, 4):
            raise OSError(28, "No space left on device")
        update()
        if len(calls) > 5:
            again.set()
            raise SystemExit  # from its thread

    monkeypatch.setattr(exporter.metrics, "update", now_and_then)
    exporter.metrics.start()
    assert again.wait(60)
    assert caplog.text.count("metrics cannot be updated") == 1


@pytest.mark.parametrize(("row", "shown"), [(CACHED_ROWS, [4, None, None]), (0, [4, 8, 9]), (ASKED_ROWS, [4, 8, 9])])
def test_a_trace_shows_no_draft_of_an_earlier_answer(row, shown):
    """The last two of three stand after the drafter's block, and are the chain's, which the block has not followed."""
    record = StepRecord(
        requests=["r"],
        decision=StepDecision(3, FixedLength()),
        drafted=[3],
        verify_lens=torch.tensor([0]),
        confidence=None,
        traced=torch.tensor([[5, 1, 4, 8, 9]]),
        chains=torch.tensor([[row + 3, 0, 7, 8, 9]]),
        num_drawn=1,
    )
    req = request([1], custom_params={"dspark": '{"core": {"trace": true}}'})
    trace_step([req], record, [0], [0])
    assert req.customized_info["dspark_trace"][-1]["draft"] == shown


def outputs(*, rounds, drafted, rows, accepted):
    """Return a batch whose second request has these counts; the ``rows`` of its verifications include the anchors."""
    return SimpleNamespace(
        spec_verify_ct=[9, rounds],
        spec_num_block_accept_tokens=[9, drafted],
        spec_num_cap_tokens=[9, rows],
        spec_num_correct_drafts=[9, accepted],
    )


def meta_info(*, rounds, drafted, rows, accepted, **of_sglang):
    """Return the report of such a request."""
    found = dict(of_sglang)
    count_drafts(None, None, found, outputs(rounds=rounds, drafted=drafted, rows=rows, accepted=accepted), 1)
    return found


def test_the_drafts_that_were_verified_count():
    of_sglang = {"spec_accept_rate": 0.1, "spec_num_proposed_drafts": 28}
    found = meta_info(rounds=4, drafted=20, rows=12, accepted=6, **of_sglang)
    assert found["dspark"] == {
        "rounds": 4,
        "drafted_tokens": 20,
        "verified_tokens": 8,
        "accepted_tokens": 6,
        "accept_length": 2.5,
    }
    assert (found["spec_accept_rate"], found["spec_num_proposed_drafts"]) == (0.75, 8)


def test_plain_steps_are_reported_and_verify_nothing():
    found = meta_info(rounds=4, drafted=0, rows=4, accepted=0, spec_accept_rate=0.0)
    assert (found["dspark"]["verified_tokens"], found["spec_accept_rate"]) == (0, 0.0)


def test_a_request_without_a_step_says_nothing():
    assert meta_info(rounds=0, drafted=0, rows=0, accepted=0) == {}
    embeddings = {}
    count_drafts(None, None, embeddings, SimpleNamespace(), 0)
    assert embeddings == {}
