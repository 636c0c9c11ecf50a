import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from models.pairs import list_pairs, load_pair
from service.settings import Settings
from tests.commands import parse
from tests.deploy.manifests import Kustomize, Objects, containers, image_variables, pod
from tests.deploy.tools import ROOT

pytestmark = [pytest.mark.deploy, pytest.mark.usefixtures("variables_of_the_image")]


def indexing(objects: Objects) -> Any:
    """Returns the options of `care index` in a Job, with the variables of the image."""
    (container,) = pod(objects["Job", "care-indexer"])["containers"]
    command, options = parse(shlex.join([*container["command"], *container["args"]]))
    assert command == "index"
    return SimpleNamespace(**options)


@pytest.mark.parametrize(
    ("built_by", "served_by"),
    [
        ("care_mini", "care_mini"),
        ("care_8b", "care_8b"),
        ("example_indexer", "example"),
        ("indexer", "example"),
    ],
)
def test_the_service_has_the_index_and_the_pair_of_the_indexer(
    built_by: str, served_by: str, kustomize: Kustomize
) -> None:
    options = indexing(kustomize(built_by))
    settings = kustomize(served_by)["ConfigMap", "care-settings"]["data"]
    assert (options.index, options.pair) == (settings["CARE_INDEX"], settings["CARE_PAIR"])


@pytest.mark.parametrize(
    "names", [["care_mini"], ["care_8b"], ["example", "example_indexer"]], ids=" and ".join
)
def test_an_overlay_is_one_namespace(names: list[str], kustomize: Kustomize) -> None:
    objects = [item for name in names for item in kustomize(name).values()]
    assert {item["metadata"]["namespace"] for item in objects} == {"care"}


@pytest.mark.parametrize(
    ("built_by", "served_by"), [("care_mini", "care_mini"), ("example_indexer", "example")]
)
def test_without_a_gpu_indexer_and_service_have_one_image(
    built_by: str, served_by: str, kustomize: Kustomize
) -> None:
    (indexer,) = pod(kustomize(built_by)["Job", "care-indexer"])["containers"]
    (service,) = pod(kustomize(served_by)["Deployment", "care"])["containers"]
    assert indexer["image"] == service["image"]
    assert load_pair(indexing(kustomize(built_by)).pair).query.format == "onnx"


def test_the_sample_in_the_image_is_indexed_in_the_volume_that_is_served(
    kustomize: Kustomize,
) -> None:
    options = indexing(kustomize("care_mini"))
    assert "COPY data/sample /data/sample" in (ROOT / "Dockerfile").read_text()
    assert (ROOT / "data/sample" / Path(options.corpus).name).is_file()
    volumes = []
    for workload in (("Job", "care-indexer"), ("Deployment", "care")):
        spec = pod(kustomize("care_mini")[workload])
        volumes += [volume for volume in spec["volumes"] if volume["name"] == "indexes"]
        mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
        assert mounts["indexes"] == str(options.indexes)
    assert len(volumes) == 2
    assert volumes[0] == volumes[1]


def test_on_gpus_the_pair_in_the_volume_is_indexed_and_served(kustomize: Kustomize) -> None:
    care_8b = kustomize("care_8b")
    options = indexing(care_8b)
    assert options.backend == "vllm"
    # The name of a trained pair: a folder in CARE_PAIRS.
    assert options.pair not in list_pairs()
    pairs = image_variables()["CARE_PAIRS"]
    for workload, image in (
        (("Job", "care-indexer"), "care-retrieval-indexer-gpu"),
        (("Deployment", "care"), "care-retrieval-service-gpu"),
    ):
        spec = pod(care_8b[workload])
        for container in containers(spec):
            assert container["image"].rpartition(":")[0].endswith(f"/{image}")
        (container,) = spec["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert {"key": "nvidia.com/gpu", "operator": "Exists"} in spec["tolerations"]
        mounts = {m["mountPath"]: m for m in container["volumeMounts"]}
        assert mounts[pairs]["readOnly"] is True
        volumes = {v["name"]: v for v in spec["volumes"]}
        claim = volumes[mounts[pairs]["name"]]["persistentVolumeClaim"]
        assert claim == {"claimName": "care-pairs", "readOnly": True}
    cache = Path(re.findall(r"CARE_TENSORRT_CACHE=(\S+)", (ROOT / "Dockerfile").read_text())[0])
    assert not mounts[str(cache.parent)].get("readOnly", False)


def test_the_index_that_the_indexer_writes_to_milvus_is_served(kustomize: Kustomize) -> None:
    in_milvus = kustomize("in_milvus")
    options = indexing(in_milvus)
    assert options.store == "milvus"
    variables = in_milvus["ConfigMap", "care-milvus"]["data"]
    settings = in_milvus["ConfigMap", "care-settings"]["data"] | variables
    values = {name.removeprefix("CARE_").lower(): value for name, value in settings.items()}
    served = Settings.model_validate(values | {"cache_secret": "given by the operator"})
    assert (served.store, served.index) == ("milvus", options.index)
    assert served.milvus_uri
    port = urlsplit(served.milvus_uri.get_secret_value()).port
    (service,) = pod(in_milvus["Deployment", "care"])["containers"]
    (indexer,) = pod(in_milvus["Job", "care-indexer"])["containers"]
    for container in (service, indexer):
        sources = [s["configMapRef"]["name"] for s in container["envFrom"] if "configMapRef" in s]
        assert any(name.startswith("care-milvus-") for name in sources)
    rules = in_milvus["NetworkPolicy", "care"]["spec"]["egress"]
    assert port in {open_["port"] for rule in rules for open_ in rule["ports"]}
    volumes = {v["name"]: v for v in pod(in_milvus["Deployment", "care"])["volumes"]}
    assert "emptyDir" in volumes["indexes"]
    mounts = {m["name"]: m for m in service["volumeMounts"]}
    assert not mounts["indexes"].get("readOnly")


@pytest.mark.parametrize(("name", "gpus"), [("indexer", 0), ("indexer_gpu", 1)])
def test_the_indexer_has_a_valid_command_and_existing_volumes(
    name: str, gpus: int, example: Objects, kustomize: Kustomize
) -> None:
    indexer = kustomize(name)
    options = indexing(indexer)
    spec = pod(indexer["Job", "care-indexer"])
    (container,) = spec["containers"]
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    assert mounts["/" + Path(options.corpus).parts[1]] is True
    assert mounts[str(options.indexes)] is mounts[str(options.builds)] is False
    assert options.index == example["ConfigMap", "care-settings"]["data"]["CARE_INDEX"]
    sources = [volume.get("persistentVolumeClaim") for volume in spec["volumes"]]
    claims = {source["claimName"] for source in sources if source}
    made = {name for kind, name in {**indexer, **example} if kind == "PersistentVolumeClaim"}
    assert claims <= made


ON_RAY = pytest.mark.parametrize("name", ["on_ray", "on_ray_to_milvus", "on_ray_with_gpus"])


@ON_RAY
def test_the_workers_of_ray_are_pods_like_that_of_the_indexer(
    name: str, kustomize: Kustomize
) -> None:
    objects = kustomize(name)
    head, workers = (pod(objects["Job", job]) for job in ("care-indexer", "care-ray-workers"))
    (indexer,), (worker,) = head["containers"], workers["containers"]
    changed = {"args", "command", "env", "volumeMounts"}
    assert {k: v for k, v in worker.items() if k not in changed} == {
        k: v for k, v in indexer.items() if k not in changed
    }
    assert {k: v for k, v in workers.items() if k not in ("containers", "volumes")} == {
        k: v for k, v in head.items() if k not in ("containers", "volumes")
    }
    # Of the volumes that one node may mount for writing, a worker needs none.
    claims = [
        v["persistentVolumeClaim"] for v in workers["volumes"] if "persistentVolumeClaim" in v
    ]
    assert all(claim["readOnly"] for claim in claims)
    assert {"/dev/shm", "/tmp", "/builds"} <= {m["mountPath"] for m in worker["volumeMounts"]}
    mounts = {m["name"] for m in worker["volumeMounts"]}
    assert mounts == {volume["name"] for volume in workers["volumes"]}


@ON_RAY
def test_the_indexer_waits_for_all_workers_and_they_find_it(
    name: str, kustomize: Kustomize
) -> None:
    objects = kustomize(name)
    job = objects["Job", "care-ray-workers"]["spec"]
    (worker,), (indexer,) = (
        pod(objects["Job", each])["containers"] for each in ("care-ray-workers", "care-indexer")
    )
    variables = {entry["name"]: entry.get("value") for entry in indexer["env"]}
    assert variables["RAY_WORKERS"] == str(job["parallelism"]) == str(job["completions"])
    secrets = [e for e in indexer["env"] if e["name"].startswith("RAY_AUTH_")]
    assert secrets == [e for e in worker["env"] if e["name"].startswith("RAY_AUTH_")]
    assert [e.get("value") for e in secrets] == ["token", None]

    (address,) = (e["value"] for e in worker["env"] if e["name"] == "RAY_ADDRESS")
    host, port = address.split(":")
    service = objects["Service", host]["spec"]
    assert service["ports"][0]["port"] == int(port)
    assert f"--port={port}" in indexer["command"][2]
    assert service["publishNotReadyAddresses"]
    labels = objects["Job", "care-indexer"]["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    (expression,) = objects["NetworkPolicy", "care-ray"]["spec"]["podSelector"]["matchExpressions"]
    of_workers = job["template"]["metadata"]["labels"]
    assert expression["values"] == [each[expression["key"]] for each in (labels, of_workers)]


@ON_RAY
def test_the_indexer_has_valid_options_for_ray(name: str, kustomize: Kustomize) -> None:
    (container,) = pod(kustomize(name)["Job", "care-indexer"])["containers"]
    *_, line = container["command"][2].splitlines()
    line = line.replace('"$RAY_ADDRESS"', "10.0.0.1:6379").replace('"$RAY_WORKERS"', "4")
    line = line.replace('exec care index "$@"', shlex.join(["care", "index", *container["args"]]))
    _, options = parse(line)
    assert (options["executor"], options["ray_address"], options["ray_actors"]) == (
        "ray",
        "10.0.0.1:6379",
        4,
    )
    assert (options["store"] == "milvus") is (name == "on_ray_to_milvus")
