import json
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from compose_spec import PyCompose

from service.settings import Settings
from tests.commands import parse
from tests.deploy.manifests import image_variables, read_compose
from tests.deploy.tools import DEPLOY, ROOT, run

COMPOSE = read_compose()
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN_IMAGES = {"care-retrieval", "care-retrieval-indexer-gpu", "care-retrieval-service-gpu"}
# Folders that the reader makes; git ignores them.
MADE = {"../pairs"}


IN_MILVUS = read_compose(file="compose.milvus.yaml")


@pytest.mark.parametrize("compose", [COMPOSE, IN_MILVUS])
def test_the_files_follow_the_compose_specification(compose: dict[str, Any]) -> None:
    assert set(PyCompose.from_json(json.dumps(compose)).service_names()) == set(compose["services"])


def test_the_index_that_is_written_to_milvus_is_served() -> None:
    indexer, service, milvus = (IN_MILVUS["services"][n] for n in ("indexer", "service", "milvus"))
    command, options = parse(indexer["command"])
    assert (command, options["store"]) == ("index", "milvus")
    _, in_files = parse(SERVICES["indexer"]["command"])
    assert options | {"store": None} == in_files
    variables = SERVICES["service"]["environment"] | service["environment"]
    settings = Settings.model_validate(
        {name.removeprefix("CARE_").lower(): value for name, value in variables.items()}
    )
    assert (settings.store, settings.index) == ("milvus", options["index"])
    assert settings.milvus_uri
    assert urlsplit(settings.milvus_uri.get_secret_value()).hostname in IN_MILVUS["services"]
    assert indexer["environment"].items() <= service["environment"].items()
    # The volume of compose.yaml is read-only.
    assert any(map(settings.indexes.is_relative_to, SERVICES["service"]["tmpfs"]))
    extras = indexer["build"]["args"]["EXTRAS"].split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"milvus", *extras} <= set(known["optional-dependencies"])
    assert "ARG EXTRAS=" in (ROOT / "Dockerfile").read_text()
    (config,) = milvus["configs"]
    assert config["source"] in IN_MILVUS["configs"]
    assert config["target"] == milvus["environment"]["ETCD_CONFIG_PATH"]
    assert milvus["volumes"][0].split(":")[0] in IN_MILVUS["volumes"]
    assert re.search(r":v\d+\.\d+\.\d+", milvus["image"])


def test_a_proxy_sends_writes_to_one_service_with_the_settings_of_the_others() -> None:
    service, writer, proxy = (IN_MILVUS["services"][n] for n in ("service", "writer", "proxy"))
    assert writer["extends"] == {"file": "compose.yaml", "service": "service"}
    own = service["environment"].keys() - writer["environment"].keys()
    assert own == {"CARE_INDEXES"}
    assert writer["environment"].items() <= service["environment"].items()
    # Without it, the writer has a volume in the folder that the image sets.
    (volume,) = (volume.split(":") for volume in writer["volumes"])
    assert volume[0] in IN_MILVUS["volumes"]
    assert volume[1] == image_variables()["CARE_INDEXES"]
    assert "deploy" not in writer
    # Only the proxy is published, on the port that the service has without it.
    assert service["ports"] == writer["ports"] == []
    host, published, port = proxy["ports"][0].split(":")
    assert [f"{host}:{published}:{published}"] == SERVICES["service"]["ports"]
    (mounted,) = (volume.split(":")[0] for volume in proxy["volumes"])
    config = (DEPLOY / mounted).read_text()
    assert f"listen {port};" in config
    assert (
        set(re.findall(r" (\w+):8000;", config)) == {"service", "writer"} <= {*proxy["depends_on"]}
    )


@pytest.mark.parametrize("name", SERVICES)
def test_the_objects_that_a_container_refers_to_exist(name: str) -> None:
    container = SERVICES[name]
    assert set(container.get("depends_on", ())) <= set(SERVICES)
    assert set(container.get("networks", ())) <= set(COMPOSE["networks"])
    for source in {volume.split(":")[0] for volume in container.get("volumes", ())} - MADE:
        assert (
            (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
        )


@pytest.mark.parametrize("name", [*SERVICES, "proxy"])
def test_a_container_has_no_more_privileges_than_it_needs(name: str) -> None:
    container = SERVICES[name] if name in SERVICES else IN_MILVUS["services"][name]
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in container.get("ports", ()))
    if container["image"] in OWN_IMAGES:
        assert "healthcheck" in container or "HEALTHCHECK" in (ROOT / "Dockerfile").read_text()
    else:
        assert re.search(r":v?\d+\.\d+\.\d+", container["image"]), "the image is not pinned"
        assert container["healthcheck"]["test"]


@pytest.mark.parametrize("name", ["service", "service-gpu"])
def test_the_variables_of_the_service_are_settings_that_it_accepts(name: str) -> None:
    variables = SERVICES[name]["environment"]
    assert {name.removeprefix("CARE_").lower() for name in variables} <= set(Settings.model_fields)
    settings = Settings.model_validate(
        {name.removeprefix("CARE_").lower(): value for name, value in variables.items()}
    )
    assert settings.redis_url
    assert urlsplit(settings.redis_url.get_secret_value()).hostname in SERVICES
    grace = float(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace > settings.drain_seconds + settings.timeout_ms / 1000


def test_corpus_index_and_base_image_are_variables() -> None:
    text = (DEPLOY / "compose.yaml").read_text("utf-8")
    variables = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    assert variables == {
        "CORPUS_DIR": "../data/sample",
        "CORPUS": "corpus.jsonl",
        "INDEX": "sample",
        "BASE_IMAGE": "python:3.11-slim",
        "PAIRS_DIR": "../pairs",
        "PAIR": "care-0.3b-8b",
    }
    assert f"\nARG BASE_IMAGE={variables['BASE_IMAGE']}\n" in (ROOT / "Dockerfile").read_text()
    for name, default in variables.items():
        assert f"#{name}={default}\n" in (DEPLOY / ".env.example").read_text()
    _, options = parse(SERVICES["indexer"]["command"])
    folder, mounted = SERVICES["indexer"]["volumes"][0].removesuffix(":ro").split(":")
    assert (DEPLOY / folder / Path(options["corpus"]).relative_to(mounted)).is_file()
    assert options["index"] == SERVICES["service"]["environment"]["CARE_INDEX"]
    assert variables["PAIRS_DIR"] in MADE
    assert f"/{Path(variables['PAIRS_DIR']).name}/" in (ROOT / ".gitignore").read_text().split()
    # The service would refuse such a variable in a shell where it is set for Compose.
    assert not any(name.startswith("CARE_") for name in variables)


def test_the_file_has_no_secret_and_says_how_to_make_one() -> None:
    variable = SERVICES["service"]["environment"]["CARE_CACHE_SECRET"]
    assert re.fullmatch(r"\$\{CARE_CACHE_SECRET:\?set it to .+\}", variable)
    assert "\nCARE_CACHE_SECRET=\n" in (DEPLOY / ".env.example").read_text()


def test_redis_is_a_bounded_cache_for_the_service_only() -> None:
    command = SERVICES["redis"]["command"]
    for option in ("--maxmemory 256mb", "--maxmemory-policy allkeys-lru", '--save ""'):
        assert option in command
    assert SERVICES["redis"]["mem_limit"] == "384m"
    assert "ports" not in SERVICES["redis"]
    networks = SERVICES["redis"]["networks"]
    assert all(COMPOSE["networks"][name]["internal"] for name in networks)
    assert [
        name for name in SERVICES if set(SERVICES[name].get("networks", ())) & set(networks)
    ] == ["service", "service-gpu", "redis"]


def test_prometheus_and_grafana_have_the_addresses_of_services() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["service:8000"]}]
    (mount,) = IN_MILVUS["services"]["prometheus"]["volumes"]
    file, target, _ = mount.split(":")
    ((pattern,),) = (source["files"] for source in job["file_sd_configs"])
    assert fnmatch(target, pattern)
    assert yaml.safe_load((DEPLOY / file).read_text()) == [{"targets": ["writer:8000"]}]
    assert "writer" in IN_MILVUS["services"]
    assert SERVICES["service"]["ports"] == ["127.0.0.1:8000:8000"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    sources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    assert sources["datasources"][0]["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((provisioning / "dashboards" / "care.yml").read_text())["providers"][0]
    mounts = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert folder["options"]["path"] in mounts


def test_each_image_is_a_target_of_the_dockerfile() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    assert targets[-1] == "service", "what docker build makes without a target"
    built = {
        container["image"]: container["build"]
        for container in SERVICES.values()
        if "build" in container
    }
    assert set(built) == OWN_IMAGES
    for image, build in built.items():
        assert build["target"] in targets
        suffix = "" if build["target"] == "service" else f"-{build['target']}"
        assert image == f"care-retrieval{suffix}"


def test_on_a_gpu_one_pair_is_indexed_and_served() -> None:
    indexer, service = SERVICES["indexer-gpu"], SERVICES["service-gpu"]
    command, options = parse(indexer["command"])
    assert (command, options["backend"]) == ("index", "vllm")
    assert options["index"] == service["environment"]["CARE_INDEX"]
    assert options["pair"] == service["environment"]["CARE_PAIR"]
    for container in (indexer, service):
        assert container["profiles"] == ["gpu"]
        (device,) = container["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        mounts = {volume.split(":")[1]: volume for volume in container["volumes"]}
        assert mounts[image_variables()["CARE_PAIRS"]].endswith(":ro")
        assert mounts[image_variables()["CARE_INDEXES"]].startswith("indexes:")
    assert service["networks"]["default"]["aliases"] == ["service"]


@pytest.mark.deploy
def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    run("hadolint", "--config", DEPLOY / "hadolint.yaml", ROOT / "Dockerfile")


def test_dockerignore_keeps_the_files_that_the_image_is_built_from() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    needed = {package.removesuffix("*") for package in packages}
    assert {"service", "indexer"} <= needed
    needed |= {
        "LICENSE",
        "README.md",
        "THIRD_PARTY.md",
        "constraints.txt",
        "constraints-vllm.txt",
        "data",
        "pyproject.toml",
    }
    # Weights are mounted, not copied into an image.
    assert {"pairs", "builds", "indexes"} <= set(ignored)
    assert not [name for name in needed for pattern in ignored if fnmatch(name, pattern)]
