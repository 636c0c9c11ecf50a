import copy
import os
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from service.observe.metrics import Metrics
from service.routes.search import public_routes
from service.settings import Settings
from tests.deploy.manifests import (
    KUSTOMIZATIONS,
    Kustomize,
    Object,
    Objects,
    containers,
    image_variables,
    pod,
    pods,
)
from tests.deploy.rules import RULE_FILES
from tests.deploy.tools import DEPLOY, PRIVATE, find, run

pytestmark = [pytest.mark.deploy, pytest.mark.usefixtures("variables_of_the_image")]

KUBERNETES = DEPLOY / "kubernetes"
VERSION = "1.37"
# Kinds that operators define; Kubernetes has no schema for them.
FOREIGN = {"ServiceMonitor", "PrometheusRule"}


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_every_object_follows_its_schema(name: str, kustomize: Kustomize) -> None:
    own = [item for (kind, _), item in kustomize(name).items() if kind not in FOREIGN]
    assert own
    for item in own:
        kubernetes_validate.validate(item, VERSION, strict=True)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_pods_have_no_more_privileges_than_they_need(name: str, kustomize: Kustomize) -> None:
    for spec in pods(kustomize(name)):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in containers(spec):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            assert re.search(r":v?\d+\.\d+\.\d+", container["image"]), "the image is not pinned"


@pytest.mark.parametrize(
    "name",
    [
        *("example", "fetching", "in_milvus", "care_mini", "care_8b", "upload", "upload_pairs"),
        *("with_writer", "in_milvus_with_writer"),
    ],
)
def test_the_objects_that_pods_refer_to_exist(name: str, kustomize: Kustomize) -> None:
    objects = kustomize(name)
    names = {(kind, item["metadata"]["name"]) for (kind, _), item in objects.items()}
    for spec in pods(objects):
        mounted = {m["name"] for c in containers(spec) for m in c.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        for volume in spec["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in names
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in names
        for source in (s for c in containers(spec) for s in c.get("envFrom", ())):
            if "configMapRef" in source:
                assert ("ConfigMap", source["configMapRef"]["name"]) in names
            elif not source["secretRef"].get("optional"):
                assert ("Secret", source["secretRef"]["name"]) in names


def test_the_file_of_keys_is_in_a_mounted_secret(kustomize: Kustomize) -> None:
    with_key_file = kustomize("with_key_file")
    spec = pod(with_key_file["Deployment", "care"])
    (volume,) = (volume for volume in spec["volumes"] if "secret" in volume)
    (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["name"] == volume["name"])
    assert "subPath" not in mount
    path = Path(with_key_file["ConfigMap", "care-settings"]["data"]["CARE_API_KEYS_FILE"])
    assert path.parent == Path(mount["mountPath"])
    command = (KUBERNETES / "components/api-keys/kustomization.yaml").read_text()
    assert f"generic {volume['secret']['secretName']} --from-file={path.name} " in command


def test_selectors_and_ports_match_the_pods(example: Objects) -> None:
    for name in ("care", "care-redis"):
        template = example["Deployment", name]["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        ports = {p["name"] for c in template["spec"]["containers"] for p in c["ports"]}
        service = example["Service", name]["spec"]
        policy = example["NetworkPolicy", name]["spec"]
        assert service["selector"].items() <= labels
        assert policy["podSelector"]["matchLabels"].items() <= labels
        assert {port["targetPort"] for port in service["ports"]} == ports
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports
    labels = example["Deployment", "care"]["spec"]["template"]["metadata"]["labels"].items()
    budget = example["PodDisruptionBudget", "care"]["spec"]["selector"]["matchLabels"]
    assert budget.items() <= labels


def selects(selector: Object, labels: Object) -> bool:
    """Whether a selector selects pods with labels; of expressions it knows `In`."""
    expressions = selector.get("matchExpressions", ())
    assert {each["operator"] for each in expressions} <= {"In"}
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


WITH_WRITER = pytest.mark.parametrize("name", ["with_writer", "in_milvus_with_writer"])


@WITH_WRITER
def test_the_writer_is_one_pod_like_those_of_the_service(name: str, kustomize: Kustomize) -> None:
    objects = kustomize(name)
    service, writer = objects["Deployment", "care"], objects["Deployment", "care-writer"]
    assert writer["spec"]["replicas"] == 1
    assert writer["spec"]["strategy"] == {"type": "Recreate"}
    scaled = [item["spec"] for (kind, _), item in objects.items() if "Autoscaler" in kind]
    assert [each["scaleTargetRef"]["name"] for each in scaled] == ["care"]
    # It has the same image, settings, secrets and volumes, and can change the files of indexes.
    expected, spec = pod(copy.deepcopy(service)), pod(copy.deepcopy(writer))
    del expected["topologySpreadConstraints"]
    (mount,) = (m for m in expected["containers"][0]["volumeMounts"] if m["name"] == "indexes")
    assert mount["readOnly"] is (name == "with_writer")
    mount["readOnly"] = False
    assert spec == expected


@WITH_WRITER
def test_nothing_that_selects_the_service_selects_the_writer_too(
    name: str, kustomize: Kustomize
) -> None:
    objects = kustomize(name)
    labels = {
        name: objects["Deployment", name]["spec"]["template"]["metadata"]["labels"]
        for name in ("care", "care-writer")
    }
    for own, other in (("care", "care-writer"), ("care-writer", "care")):
        (port,) = objects["Service", own]["spec"]["ports"]
        (container,) = pod(objects["Deployment", own])["containers"]
        assert port["targetPort"] == container["ports"][0]["name"]
        for selector in (
            {"matchLabels": objects["Service", own]["spec"]["selector"]},
            objects["Deployment", own]["spec"]["selector"],
        ):
            assert selects(selector, labels[own])
            assert not selects(selector, labels[other])
    # One pod has no budget: it would keep a node from being drained.
    budget = objects["PodDisruptionBudget", "care"]["spec"]["selector"]
    assert [selects(budget, each) for each in labels.values()] == [True, False]
    # The same connections are open to both.
    policy = objects["NetworkPolicy", "care"]["spec"]["podSelector"]
    (rule,) = objects["NetworkPolicy", "care-redis"]["spec"]["ingress"]
    for each in labels.values():
        assert selects(policy, each)
        assert [selects(peer["podSelector"], each) for peer in rule["from"]].count(True) == 1


def test_the_service_monitor_finds_the_writer_under_the_name_of_the_job(
    kustomize: Kustomize,
) -> None:
    objects = kustomize("with_writer")
    monitor = objects["ServiceMonitor", "care"]["spec"]
    for name in ("care", "care-writer"):
        labels = objects["Service", name]["metadata"]["labels"]
        assert selects(monitor["selector"], labels)
        assert labels[monitor["jobLabel"]] == "care"


def test_the_writer_has_room_for_a_copy_of_an_index_in_milvus(kustomize: Kustomize) -> None:
    """It builds the base anew there; pods of the service keep what was written since the build."""
    volumes = pod(kustomize("in_milvus_with_writer")["Deployment", "care-writer"])["volumes"]
    (room,) = (volume["emptyDir"]["sizeLimit"] for volume in volumes if volume["name"] == "indexes")
    claim = kustomize("example")["PersistentVolumeClaim", "care-indexes"]["spec"]
    assert room == claim["resources"]["requests"]["storage"]


def test_the_service_monitor_finds_the_service_under_the_name_of_the_job(example: Objects) -> None:
    monitor = example["ServiceMonitor", "care"]["spec"]
    service = example["Service", "care"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "care"
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] in {route.path for route in public_routes.routes}


def test_the_probes_request_existing_routes(example: Objects) -> None:
    (container,) = pod(example["Deployment", "care"])["containers"]
    asked = [
        container[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")
    ]
    assert [probe["path"] for probe in asked] == ["/health/live", "/health/live", "/health/ready"]
    assert {probe["path"] for probe in asked} <= {route.path for route in public_routes.routes}
    assert {probe["port"] for probe in asked} == {container["ports"][0]["name"]}


def test_the_settings_are_accepted_and_leave_time_to_drain(example: Objects) -> None:
    variables = {
        **example["ConfigMap", "care-settings"]["data"],
        **dict.fromkeys(example["Secret", "care-secrets"]["data"], "given by the operator"),
    }
    values = {name.removeprefix("CARE_").lower(): value for name, value in variables.items()}
    assert set(values) <= set(Settings.model_fields)
    settings = Settings.model_validate(values)
    assert settings.watch_seconds > 0
    spec = pod(example["Deployment", "care"])
    drain = settings.drain_seconds + settings.timeout_ms / 1000
    assert settings.drain_seconds > 0
    assert spec["terminationGracePeriodSeconds"] > drain
    assert settings.redis_url
    assert settings.redis_url.get_secret_value() == "redis://care-redis:6379/0"
    # Kubernetes would set CARE_PORT=tcp://… for a Service named care.
    assert spec["enableServiceLinks"] is False


def test_the_autoscaler_reads_a_metric_that_is_exported_and_adapted(example: Objects) -> None:
    scaler = example["HorizontalPodAutoscaler", "care"]["spec"]
    assert "replicas" not in example["Deployment", "care"]["spec"]
    (queue,) = [metric["pods"] for metric in scaler["metrics"] if metric["type"] == "Pods"]
    name = queue["metric"]["name"]
    assert name in {family.name for family in Metrics().registry.collect()}
    values = yaml.safe_load((KUBERNETES / "prometheus-adapter-values.yaml").read_text())
    assert name in {rule["name"]["as"] for rule in values["rules"]["custom"]}
    limit = int(example["ConfigMap", "care-settings"]["data"]["CARE_QUEUE_TOKENS"])
    assert int(queue["target"]["averageValue"]) < limit


def test_an_overlay_without_secrets_fails(tmp_path: Path) -> None:
    copy = shutil.copytree(
        DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("secrets.env")
    )
    result = subprocess.run(
        [find("kubectl"), "kustomize", copy / "kubernetes" / "overlays" / "example"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, "secrets.env" in result.stderr) == (1, True)


def test_pairs_are_uploaded_to_the_volume_that_pods_mount(kustomize: Kustomize) -> None:
    (container,) = pod(kustomize("upload_pairs")["Pod", "care-upload"])["containers"]
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounts["pairs"] == image_variables()["CARE_PAIRS"]
    assert mounts["corpus"] == "/corpus"


@pytest.mark.parametrize("name", ["example", "care_mini", "care_8b"])
def test_pods_wait_for_the_first_version(name: str, kustomize: Kustomize, tmp_path: Path) -> None:
    spec = pod(kustomize(name)["Deployment", "care"])
    (waiting,) = spec["initContainers"]
    (service,) = spec["containers"]
    assert waiting["image"] == service["image"]
    assert waiting["volumeMounts"][0] in service["volumeMounts"]
    shell, option, script = waiting["command"]
    command = [
        shell,
        option,
        script.replace("/indexes", str(tmp_path)).replace("sleep 5", "exit 3"),
    ]
    environment = {"PATH": os.environ["PATH"], "CARE_INDEX": "medical"}
    assert subprocess.run(command, env=environment, timeout=60).returncode == 3
    (tmp_path / "medical").mkdir()
    (tmp_path / "medical" / "CURRENT").write_text("1\n")
    assert subprocess.run(command, env=environment, timeout=60).returncode == 0


def test_the_ingress_and_the_service_have_the_same_path(kustomize: Kustomize) -> None:
    behind_ingress = kustomize("behind_ingress")
    (rule,) = behind_ingress["Ingress", "care"]["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    root = behind_ingress["ConfigMap", "care-settings"]["data"]["CARE_ROOT_PATH"]
    pattern = re.compile(path["path"])
    for public in ("", "search", "v1/embeddings", "documents/metrics", "health-care", "index"):
        found = pattern.fullmatch(f"{root}/{public}")
        assert found and found[1] == public
    assert not any(pattern.fullmatch(f"{root}{private}") for private in PRIVATE)
    assert Settings(root_path=root).root_path == root
    backend = path["backend"]["service"]
    ports = behind_ingress["Service", backend["name"]]["spec"]["ports"]
    assert backend["port"]["name"] in {port["name"] for port in ports}


def test_the_script_prints_the_rules_as_prometheus_rule_objects() -> None:
    output = run(str(KUBERNETES / "prometheus-rules.sh"))
    objects = list(yaml.safe_load_all(output))
    assert [item["kind"] for item in objects] == ["PrometheusRule"] * len(RULE_FILES)
    for item, path in zip(objects, RULE_FILES, strict=True):
        assert item["metadata"]["name"] == f"care-{path.stem}"
        assert item["spec"] == yaml.safe_load(path.read_text())


def test_a_pod_downloads_only_the_active_version(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket" / "medical"
    for version in ("old", "new"):
        (bucket / version).mkdir(parents=True)
        (bucket / version / "manifest.json").write_text(version)
    (bucket / "CURRENT").write_text("new\n")
    script = KUBERNETES / "components" / "index-from-bucket" / "fetch-index.sh"
    environment = {
        "PATH": os.pathsep.join([str(Path(find("rclone")).parent), os.environ["PATH"]]),
        "RCLONE_CONFIG": str(tmp_path / "rclone.conf"),
        "RCLONE_CONFIG_INDEXES_TYPE": "local",
        "SOURCE": f"indexes:{tmp_path / 'bucket'}",
        "CARE_INDEX": "medical",
        "DESTINATION": str(tmp_path / "indexes"),
    }
    subprocess.run(["sh", script], env=environment, check=True, timeout=60)
    index = tmp_path / "indexes" / "medical"
    assert sorted(path.name for path in index.iterdir()) == ["CURRENT", "new"]
    assert (index / "CURRENT").read_text() == "new\n"
    assert (index / "new" / "manifest.json").read_text() == "new"
