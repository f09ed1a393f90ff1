"""The container files fit the project and one another. Images are not built here."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from sglang_dspark.engine.support import TESTED_SGLANG

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
COMPOSE = {name: yaml.safe_load((DOCKER / name).read_text()) for name in ("compose.yaml", "compose.replicas.yaml")}
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))


def services(name):
    """Services of a compose file; one that extends another file's has the keys of both."""
    found = {}
    for label, service in COMPOSE[name]["services"].items():
        base = service.get("extends")
        found[label] = {**COMPOSE[base["file"]]["services"][base["service"]], **service} if base else service
    return found


def test_cuda_image_offers_the_releases_that_the_plugin_drives():
    named = re.findall(r"lmsysorg/sglang:v(\S+)", (DOCKER / "cuda.Dockerfile").read_text())
    assert sorted(named) == sorted(TESTED_SGLANG)


@pytest.mark.parametrize("release", TESTED_SGLANG)
def test_constraints_exist_for_every_release(release):
    files = [ROOT / "constraints.txt", ROOT / f"constraints-{release}.txt"]
    assert any(f"sglang=={release}" in file.read_text().splitlines() for file in files if file.exists())
    [range_] = [
        Requirement(entry)
        for entry in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if entry.startswith("sglang")
    ]
    assert range_.specifier.contains(release)


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


@pytest.mark.parametrize("name", COMPOSE)
def test_mounts_builds_and_volumes_exist(name):
    for label, service in services(name).items():
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert (ROOT / service["build"]["dockerfile"]).exists()
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            known = (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE[name]["volumes"]
            assert known, f"{name}: {label} mounts {source}"


@pytest.mark.parametrize("name", COMPOSE)
def test_caches_are_mounted_where_the_images_keep_them(name):
    image = (DOCKER / "cuda.Dockerfile").read_text()
    kept = json.loads(re.search(r"^VOLUME (.*)$", image, re.MULTILINE)[1])
    servers = [service for service in services(name).values() if "sglang-dspark:" in str(service.get("image"))]
    assert servers
    for service in servers:
        assert [mount.split(":")[1] for mount in service["volumes"]] == kept
        assert "--enable-metrics" in service["command"] and "DSPARK" in service["command"]


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


def test_router_knows_every_replica():
    found = services("compose.replicas.yaml")
    replicas = {label for label in found if label.startswith("replica-")}
    urls = {word for word in found["router"]["command"] if word.startswith("http")}
    assert urls == {f"http://{label}:30000" for label in replicas} and set(found["router"]["depends_on"]) == replicas


def test_grafana_finds_data_source_and_dashboard():
    mounts = dict(mount.split(":")[:2] for mount in services("compose.yaml")["grafana"]["volumes"])
    provisioning = DOCKER / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dspark.yaml").read_text())["providers"]
    assert mounts["./grafana"] == provider["options"]["path"]
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services("compose.yaml")
