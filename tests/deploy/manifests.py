"""The files of deploy/ as Compose and Kubernetes read them."""

import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.tools import DEPLOY, ROOT, run

Object = dict[str, Any]
Objects = dict[tuple[str, str], Object]


class _Loader(yaml.SafeLoader):
    """Reads the tag by which a file for Compose removes a value of another one."""


_Loader.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))


def read_compose(variables: dict[str, str] | None = None, file: str = "compose.yaml") -> Object:
    """Reads a file for Compose with the values of some variables and the defaults of the others."""
    values = variables or {}

    def value(match: re.Match[str]) -> str:
        return values.get(match[1], match[2] if match[2] is not None else match[0])

    text = (DEPLOY / file).read_text("utf-8")
    text = re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)\}", value, text)
    compose: Object = _Loader(text).get_single_data()
    return compose


def render(
    folder: str, deploy: Path, components: Sequence[str] = (), without: Sequence[str] = ()
) -> Objects:
    """Builds a kustomization as kubectl would apply it.

    Args:
        folder: Folder of the kustomization, in deploy/kubernetes.
        deploy: Folder that does not exist, for a copy of deploy/ with secrets.
        components: Components that are added.
        without: Components that are removed.

    Returns:
        Objects by kind and by name without the checksum of generated names.
    """
    shutil.copytree(DEPLOY, deploy, ignore=shutil.ignore_patterns("secrets.env"))
    overlays = deploy / "kubernetes" / "overlays"
    for overlay in overlays.iterdir():
        shutil.copy(overlays / "example" / "secrets.env.example", overlay / "secrets.env")
    path = deploy / "kubernetes" / folder / "kustomization.yaml"
    kustomization = yaml.safe_load(path.read_text())
    kept = [name for name in kustomization.get("components", ()) if name not in without]
    kustomization["components"] = [*kept, *components]
    path.write_text(yaml.safe_dump(kustomization))
    output = run("kubectl", "kustomize", path.parent)
    assert "Warning" not in output
    return {
        (item["kind"], re.sub(r"-[a-z0-9]{10}$", "", item["metadata"]["name"])): item
        for item in yaml.safe_load_all(output)
    }


def pod(workload: Object) -> Object:
    """Returns the specification of the pods of a workload, or of a pod."""
    spec: Object = workload["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def image_variables() -> dict[str, str]:
    """Returns the CARE_* variables that the Dockerfile sets."""
    return dict(
        re.findall(r"\b(CARE_\w+)=(\S+)", (ROOT / "Dockerfile").read_text().split("ENV")[1])
    )


def pods(objects: Objects) -> list[Object]:
    return [
        pod(item) for (kind, _), item in objects.items() if kind in ("Deployment", "Job", "Pod")
    ]


def containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


Kustomize = Callable[[str], Objects]


KUSTOMIZATIONS = {
    "example": partial(render, "overlays/example"),
    "example_indexer": partial(render, "overlays/example/indexer"),
    "fetching": partial(
        render,
        "overlays/example",
        components=["../../components/index-from-bucket"],
        without=["../../components/wait-for-index"],
    ),
    "in_milvus": partial(
        render,
        "overlays/care-mini",
        components=["../../components/index-in-milvus"],
        without=["../../components/wait-for-index"],
    ),
    "with_writer": partial(
        render,
        "overlays/example",
        components=["../../components/ingress", "../../components/one-writer"],
    ),
    "in_milvus_with_writer": partial(
        render,
        "overlays/care-mini",
        components=["../../components/index-in-milvus", "../../components/one-writer"],
        without=["../../components/wait-for-index"],
    ),
    "behind_ingress": partial(render, "overlays/example", components=["../../components/ingress"]),
    "with_key_file": partial(render, "overlays/example", components=["../../components/api-keys"]),
    "care_mini": partial(render, "overlays/care-mini"),
    "care_8b": partial(render, "overlays/care-0.3b-8b"),
    "indexer": partial(render, "indexer"),
    "indexer_gpu": partial(render, "indexer-gpu"),
    "on_ray": partial(
        render, "overlays/example/indexer", components=["../../../components/index-on-ray"]
    ),
    "on_ray_to_milvus": partial(
        render,
        "overlays/care-mini",
        components=["../../components/index-in-milvus", "../../components/index-on-ray"],
        without=["../../components/wait-for-index"],
    ),
    "on_ray_with_gpus": partial(
        render, "overlays/care-0.3b-8b", components=["../../components/index-on-ray"]
    ),
    "upload": partial(render, "upload"),
    "upload_pairs": partial(render, "upload-pairs"),
}
