"""The container image: its contents, and indexing and search as documented and as in deploy/."""

import json
import re
import shlex
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from core.service_process import free_port
from tests.conftest import make_records, write_jsonl
from tests.deploy import manifests
from tests.deploy.manifests import Object
from tests.deploy.tools import DEPLOY, ROOT
from tests.image.containers import IMAGE, engine, run, wait_until_ready

pytestmark = pytest.mark.timeout(900)

TRAINING_LIBRARIES = {"torch", "transformers", "sentence-transformers", "mteb", "ray", "vllm"}
MAX_MIB = 650
CACHE_SECRET = "secret of the test"
TAKEN_OVER_WITHIN = 60.0


@pytest.fixture(scope="module")
def configuration() -> Object:
    """The configuration of the image, as Docker prints it."""
    (image,) = json.loads(engine("image", "inspect", IMAGE))
    config: Object = image["Config"]
    # Podman prints it beside the configuration.
    config.setdefault("Healthcheck", image.get("Healthcheck"))
    return config


@pytest.fixture
def name() -> Iterator[Callable[[str], str]]:
    """Returns names of containers and volumes that are deleted after the test."""
    suffix = uuid.uuid4().hex[:8]
    made: list[str] = []

    def unique(prefix: str) -> str:
        made.append(f"{prefix}-{suffix}")
        return made[-1]

    yield unique
    for command in (["rm", "--force"], ["volume", "rm", "--force"]):
        for each in made:
            engine(*command, each)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with a corpus of 20 documents, which any user can read."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write_jsonl(folder / "corpus.jsonl", make_records(20))
    for path in (tmp_path, folder):
        path.chmod(0o755)
    return folder


def request(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def search(url: str, query: str) -> list[Any]:
    hits: list[Any] = request(f"{url}/search", {"query": query, "top_k": 3})["hits"]
    return hits


def written(container: str) -> set[str]:
    """Returns the paths that a container has changed outside of its volumes."""
    return {line.split(maxsplit=1)[1] for line in engine("diff", container).splitlines()}


def stop(container: str) -> int:
    """Stops a container as Kubernetes would; returns the exit status of its process."""
    engine("stop", "--time", "45", container)
    return int(engine("inspect", "--format", "{{.State.ExitCode}}", container))


def test_the_image_has_no_training_library_and_is_small() -> None:
    code = "import importlib.metadata as m; print(*(d.name.lower() for d in m.distributions()))"
    assert not TRAINING_LIBRARIES & set(run(IMAGE, "python", "-c", code).split())
    assert int(run(IMAGE, "du", "--summarize", "--block-size=1M", "/opt/care").split()[0]) < MAX_MIB


def test_the_image_runs_as_an_unprivileged_user(configuration: Object) -> None:
    assert configuration["User"] == "10001"
    assert run(IMAGE, "id", "--user").strip() == "10001"


def test_the_image_has_the_folders_that_its_variables_name(configuration: Object) -> None:
    variables = dict(entry.split("=", 1) for entry in configuration["Env"])
    assert variables.items() >= manifests.image_variables().items()
    for folder in (variables["CARE_INDEXES"], variables["CARE_BUILDS"]):
        run(IMAGE, "test", "-w", folder)


def documented_commands() -> list[list[str]]:
    """Returns the `docker run` commands of the comment of the Dockerfile."""
    comment = re.findall(r"^# ?(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    text = "\n".join(comment).replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^ +docker run (.*)$", text, re.MULTILINE)]


def test_the_documented_commands_index_and_serve_a_corpus(
    name: Callable[[str], str], corpus: Path, configuration: Object
) -> None:
    index, serve = documented_commands()
    port = free_port()
    replacements = {
        "care-indexes:": f"{name('care-indexes')}:",
        "care-builds:": f"{name('care-builds')}:",
        "/data/mine:": f"{corpus}:",
        "127.0.0.1:8000:": f"127.0.0.1:{port}:",
    }

    def adapted(command: list[str]) -> list[str]:
        arguments = [IMAGE if word == "care-retrieval" else word for word in command]
        assert arguments.pop(0) == "--rm"
        for old, new in replacements.items():
            arguments = [re.sub(f"^{re.escape(old)}", new, word) for word in arguments]
        return arguments

    indexer, service = name("indexer"), name("service")
    output = run(*adapted(index), name=indexer)
    assert "active" in output
    assert not {path for path in written(indexer) if path.startswith("/home")}
    run(*adapted(serve), name=service, detach=True)
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(service, url)
    assert [hit["rank"] for hit in search(url, "高血压")] == [1, 2, 3]
    engine("exec", service, *configuration["Healthcheck"]["Test"][1:])
    assert not {path for path in written(service) if path.startswith("/home")}
    assert stop(service) == 0


def compose_options(service: Object, volumes: Mapping[str, str]) -> list[str]:
    """Returns the options of `docker run` that a service of Compose stands for."""
    options = ["--read-only"] if service["read_only"] else []
    for option, key in (("--cap-drop", "cap_drop"), ("--security-opt", "security_opt")):
        options += [word for value in service[key] for word in (option, value)]
    options += [word for folder in service["tmpfs"] for word in ("--tmpfs", folder)]
    for variable, value in service.get("environment", {}).items():
        options += ["--env", f"{variable}={value}"]
    for volume in service["volumes"]:
        source, target = volume.split(":", 1)
        options += ["--volume", f"{volumes.get(source, source)}:{target}"]
    return options


def test_compose_indexes_and_serves_a_corpus_and_loads_the_next_version(
    name: Callable[[str], str], corpus: Path
) -> None:
    variables = {"CORPUS_DIR": str(corpus), "INDEX": "mine", "CARE_CACHE_SECRET": CACHE_SECRET}
    services = manifests.read_compose(variables)["services"]
    volumes = {volume: name(volume) for volume in ("indexes", "builds")}
    indexer = compose_options(services["indexer"], volumes)
    command = shlex.split(services["indexer"]["command"])
    run(*indexer, IMAGE, *command)
    port, service = free_port(), name("service")
    options = compose_options(services["service"], volumes)
    # Redis is not started: the service works without it.
    run(*options, "--publish", f"127.0.0.1:{port}:8000", IMAGE, name=service, detach=True)
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(service, url)
    assert len(search(url, "高血压")) == 3
    first = request(f"{url}/index")
    write_jsonl(corpus / "corpus.jsonl", make_records(25))
    run(*indexer, IMAGE, *command)
    end = time.monotonic() + TAKEN_OVER_WITHIN
    while (second := request(f"{url}/index"))["version"] == first["version"]:
        assert time.monotonic() < end, engine("logs", service)
        time.sleep(0.5)
    assert (first["documents"], second["documents"]) == (20, 25)
    assert stop(service) == 0


def kubernetes_options(
    objects: manifests.Objects, spec: Object, container: Object, volumes: Mapping[str, str]
) -> list[str]:
    """Returns the options of `docker run` that a container of a pod stands for."""
    context, own = spec["securityContext"], container["securityContext"]
    options = ["--user", f"{context['runAsUser']}:{context['runAsGroup']}"]
    options += ["--read-only"] if own["readOnlyRootFilesystem"] else []
    options += [] if own["allowPrivilegeEscalation"] else ["--security-opt", "no-new-privileges"]
    options += [word for value in own["capabilities"]["drop"] for word in ("--cap-drop", value)]
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            for variable, value in objects["ConfigMap", "care-settings"]["data"].items():
                options += ["--env", f"{variable}={value}"]
        else:
            options += ["--env", f"CARE_CACHE_SECRET={CACHE_SECRET}"]
    kinds = {volume["name"]: volume for volume in spec["volumes"]}
    for mount in container["volumeMounts"]:
        if "emptyDir" in kinds[mount["name"]]:
            options += ["--tmpfs", mount["mountPath"]]
        else:
            mode = ":ro" if mount.get("readOnly") else ""
            volume = f"{volumes[mount['name']]}:{mount['mountPath']}{mode}"
            options += ["--volume", volume]
    return options


def test_the_overlay_care_mini_indexes_and_serves_the_sample(
    name: Callable[[str], str], tmp_path: Path
) -> None:
    objects = manifests.render("overlays/care-mini", tmp_path / DEPLOY.name)
    volumes = {volume: name(volume) for volume in ("corpus", "indexes", "builds")}
    job, deployment = (
        manifests.pod(objects[key]) for key in (("Job", "care-indexer"), ("Deployment", "care"))
    )
    for spec, container in (
        (job, job["containers"][0]),
        (deployment, deployment["initContainers"][0]),
    ):
        options = kubernetes_options(objects, spec, container, volumes)
        run(*options, IMAGE, *container["command"], *container.get("args", ()))
    port, service = free_port(), name("service")
    options = kubernetes_options(objects, deployment, deployment["containers"][0], volumes)
    run(*options, "--publish", f"127.0.0.1:{port}:8000", IMAGE, name=service, detach=True)
    url = f"http://127.0.0.1:{port}"
    wait_until_ready(service, url)
    assert request(f"{url}/index")["name"] == "sample"
    (hit, *_) = search(url, "血压高的人平时吃饭要注意什么？")
    assert hit["metadata"]["department"] == "心血管科"
    assert stop(service) == 0
