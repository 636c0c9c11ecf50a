from functools import cache
from pathlib import Path

import pytest

from care.cli.main import main
from tests.conftest import make_records, write_jsonl
from tests.deploy.manifests import KUSTOMIZATIONS, Kustomize, Objects, image_variables
from tests.service.conftest import UNUSUAL_IDS


@pytest.fixture(scope="package")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with index 'test', built with care-mini: 8 documents, and some with unusual ids."""
    folder = tmp_path_factory.mktemp("live")
    unusual = [{"_id": id_, "text": "骨折的护理"} for id_ in UNUSUAL_IDS]
    corpus = write_jsonl(folder / "corpus.jsonl", [*make_records(8), *unusual])
    arguments = ["index", str(corpus), "--index", "test"]
    folders = ["--indexes", str(folder / "indexes"), "--builds", str(folder / "builds")]
    assert main([*arguments, *folders]) == 0
    return folder / "indexes"


@pytest.fixture(scope="module")
def kustomize(tmp_path_factory: pytest.TempPathFactory) -> Kustomize:
    """Builds a kustomization by its name in KUSTOMIZATIONS, once for all tests."""

    @cache
    def build(name: str) -> Objects:
        return KUSTOMIZATIONS[name](deploy=tmp_path_factory.mktemp(name) / "deploy")

    return build


@pytest.fixture
def variables_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in image_variables().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def example(kustomize: Kustomize) -> Objects:
    return kustomize("example")
