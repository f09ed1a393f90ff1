"""Names of metrics as releases of Prometheus get them, which ask for different forms."""

import pytest
from prometheus_client import CollectorRegistry, Counter, make_asgi_app
from prometheus_client.openmetrics.parser import text_string_to_metric_families as of_openmetrics
from prometheus_client.parser import text_string_to_metric_families as of_text
from starlette.applications import Starlette
from starlette.testclient import TestClient

from sglang_dspark.features.reports.metric_names import UnescapedNames

OPENMETRICS, TEXT = "application/openmetrics-text", "text/plain"
OLDER = f"{OPENMETRICS};version=1.0.0,{OPENMETRICS};version=0.0.1;q=0.75,{TEXT};version=0.0.4;q=0.5,*/*;q=0.1"
NEWER = (
    f"{OPENMETRICS};version=1.0.0;escaping=allow-utf-8;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,"
    f"{TEXT};version=1.0.0;escaping=allow-utf-8;q=0.4,{TEXT};version=0.0.4;q=0.3,*/*;q=0.2"
)


@pytest.fixture(scope="module")
def client():
    registry = CollectorRegistry()
    Counter("sglang:dspark_steps_total", "Steps.", registry=registry).inc(3)
    app = Starlette()
    app.mount("/metrics", make_asgi_app(registry=registry))
    app.add_middleware(UnescapedNames)
    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (OLDER, OPENMETRICS),
        (NEWER, OPENMETRICS),
        (NEWER.replace("allow-utf-8", "underscores"), OPENMETRICS),
        (OPENMETRICS, OPENMETRICS),
        (f"{OPENMETRICS}; version=0.0.1,{TEXT};version=0.0.4;q=0.5,*/*;q=0.1", TEXT),
        (f"{TEXT};version=0.0.4", TEXT),
        ("*/*", TEXT),
    ],
    ids=["2.42", "3", "3, legacy names", "no version", "2.4", "text", "anything"],
)
def test_names_have_their_colon(client, path, accept, kind):
    answer = client.get(path, headers={"Accept": accept})
    assert answer.headers["content-type"].split(";")[0] == kind
    families = (of_openmetrics if kind == OPENMETRICS else of_text)(answer.text)
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    assert samples["sglang:dspark_steps_total"] == 3.0
