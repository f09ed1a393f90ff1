"""The container files fit the project and one another. Images are not built here."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sglang_dspark.engine.support import SERVED_SGLANG

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
COMPOSE = {name: yaml.safe_load((DOCKER / name).read_text()) for name in ("compose.yaml", "compose.replicas.yaml")}
KUBERNETES = DOCKER / "kubernetes"
EXAMPLES = ("replicas.yaml", "two_nodes.yaml")
SHARED = list(yaml.safe_load_all((KUBERNETES / "shared.yaml").read_text()))
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def services(name):
    """Services of a compose file; one that extends another file's has the keys of both."""
    found = {}
    for label, service in COMPOSE[name]["services"].items():
        base = service.get("extends")
        found[label] = {**COMPOSE[base["file"]]["services"][base["service"]], **service} if base else service
    return found


def test_image_and_constraints_have_a_release_that_is_served():
    [base] = re.findall(r"lmsysorg/sglang:v(\S+)", (DOCKER / "cuda.Dockerfile").read_text())
    [pinned] = re.findall(r"^sglang==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert base == pinned
    [range_] = [
        Requirement(entry)
        for entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if entry.startswith("sglang")
    ]
    assert range_.specifier == SpecifierSet(SERVED_SGLANG)
    assert base in range_.specifier


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_a_user_and_tell_their_health(path):
    instructions = re.findall(r"^([A-Z]+) (.*)", path.read_text().replace("\\\n", ""), re.MULTILINE)
    users = [argument for name, argument in instructions if name == "USER"]
    assert users == ["10001"] and any(name == "HEALTHCHECK" for name, _ in instructions)
    (health,) = (argument for name, argument in instructions if name == "HEALTHCHECK")
    program = json.loads(health.partition("CMD ")[2])
    compile(program[2], "health check", "exec")
    assert "http://127.0.0.1:30000/health" in program[2]
    (entry,) = (json.loads(argument) for name, argument in instructions if name == "ENTRYPOINT")
    assert entry[entry.index("--port") + 1] == "30000" and entry[entry.index("--host") + 1] == "0.0.0.0"


def test_context_holds_all_that_an_image_copies():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert [name for name in allowed if not (ROOT / name).exists()] == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "pyproject.toml", "sglang_dspark", "kernels"} <= set(allowed)


@pytest.mark.parametrize(
    ("compose", "config"), [("compose.yaml", "prometheus.yml"), ("compose.replicas.yaml", "replicas.yml")]
)
def test_prometheus_scrapes_what_compose_starts(compose, config):
    found = services(compose)
    aliases = {
        alias
        for service in found.values()
        for alias in service.get("networks", {}).get("default", {}).get("aliases", ())
    }
    jobs = yaml.safe_load((DOCKER / "prometheus" / config).read_text())["scrape_configs"]
    targets = [target for job in jobs for static in job["static_configs"] for target in static["targets"]]
    assert targets and {target.split(":")[0] for target in targets} <= {*found, *aliases}
    assert any(f"./prometheus/{config}:" in mount for mount in found["prometheus"]["volumes"])


def pods(name):
    """Pod specifications of a file for Kubernetes, by their labels, and its services."""
    found, documents = [], list(yaml.safe_load_all((KUBERNETES / name).read_text()))
    for document in documents:
        spec = document["spec"]
        group = spec.get("leaderWorkerTemplate", {})
        templates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
        found += [(template["metadata"]["labels"], template["spec"]) for template in templates if template]
    return found, [document for document in documents if document["kind"] == "Service"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_pod_is_a_container_of_compose_with_a_gpu_and_a_health(name):
    found, _ = pods(name)
    image = services("compose.replicas.yaml")["replica-0"]["image"]
    dockerfile = (DOCKER / "cuda.Dockerfile").read_text()
    kept = json.loads(re.search(r"^VOLUME (.*)$", dockerfile, re.MULTILINE)[1])
    assert found
    for _, spec in found:
        [container] = spec["containers"]
        assert container["image"] == image and container["resources"]["limits"]["nvidia.com/gpu"] > 0
        assert spec["enableServiceLinks"] is False  # variables of Services look like options
        assert spec["securityContext"]["runAsUser"] == spec["securityContext"]["fsGroup"] == 10001
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            health = container[probe]
            assert health["httpGet"] == {"path": "/health", "port": "http"} and ports["http"] == 30000
        assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1200
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {*mounts.values()} == {*kept, "/dev/shm"}
        assert {volume["name"] for volume in spec["volumes"]} == set(mounts)
        named = [volume["persistentVolumeClaim"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
        used = [claim["claimName"] for claim in named] + [map_["configMapRef"]["name"] for map_ in container["envFrom"]]
        assert sorted(used) == sorted(document["metadata"]["name"] for document in SHARED)


@pytest.mark.parametrize("name", EXAMPLES)
def test_services_and_metrics_find_the_servers_that_answer(name):
    found, entrances = pods(name)
    monitor = yaml.safe_load((KUBERNETES / "metrics.yaml").read_text())["spec"]
    [entrance] = [document["spec"] for document in entrances]
    for labels, spec in found:
        answers = labels.get("role") != "worker"  # the second node of a server has no routes but its health
        assert (entrance["selector"].items() <= labels.items()) == answers
        assert (monitor["selector"]["matchLabels"].items() <= labels.items()) == answers
        [container] = spec["containers"]
        assert "--enable-metrics" in container["args"]
        named = {port["name"] for port in container["ports"]}
        assert {entrance["ports"][0]["targetPort"], monitor["podMetricsEndpoints"][0]["port"]} <= named


def test_the_ranks_of_two_nodes_are_as_many_as_their_gpus():
    [group, _] = yaml.safe_load_all((KUBERNETES / "two_nodes.yaml").read_text())
    template = group["spec"]["leaderWorkerTemplate"]
    assert template["leaderTemplate"]["spec"] == template["workerTemplate"]["spec"]
    [container] = template["workerTemplate"]["spec"]["containers"]
    words, gpus = container["args"], container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(words[words.index("--tp-size") + 1]) == template["size"] * gpus
    meeting = words[words.index("--dist-init-addr") + 1]
    assert int(meeting.split(":")[1]) in {port["containerPort"] for port in container["ports"]} - {30000}
    # A node that lives on after the other one has ended would wait for it for ever.
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_grafana_finds_data_source_and_dashboard():
    mounts = dict(mount.split(":")[:2] for mount in services("compose.yaml")["grafana"]["volumes"])
    provisioning = DOCKER / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dspark.yaml").read_text())["providers"]
    assert mounts["./grafana"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services("compose.yaml")
