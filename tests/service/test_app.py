"""Errors that `create_app` reports before it loads a model."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from core.errors import CareError, EmbeddingSpaceError, PairError, ProviderError
from core.manifest import IndexManifest
from models.encoders.providers import ProviderOptions
from models.pairs import load_pair, write_pair
from service.app import create_app, load_query_encoder
from service.settings import Settings
from tests.encoders import BigramEncoder
from tests.errors import raises


def written(folder: Path, name: str, **changes: Any) -> Path:
    """The file of a changed pair, in the embedding space of the test index."""
    pair = load_pair(name)
    query, document = (
        side.model_copy(update={"embedding_space": "bigrams-1", **changes})
        for side in (pair.query, pair.document)
    )
    path = folder / "pair.toml"
    write_pair(pair.model_copy(update={"query": query, "document": document}), path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A pair whose weights do not exist."""
    return written(tmp_path, "care-mini", weights="missing.onnx")


def test_another_embedding_space_is_reported_before_the_model_is_loaded(
    settings: Settings, manifest: IndexManifest, pair: Path
) -> None:
    pair.write_text(pair.read_text("utf-8").replace("bigrams-1", "other-1"), encoding="utf-8")
    spaces = {"embedding_space": "bigrams-1", "encoder_space": "other-1"}
    with raises(EmbeddingSpaceError, "embedding_space_mismatch", index="test", **spaces):
        create_app(settings.model_copy(update={"pair": str(pair)}))


def test_a_pair_that_is_not_exported_is_reported(
    settings: Settings, manifest: IndexManifest, tmp_path: Path
) -> None:
    """Its query side is a checkpoint of transformers."""
    path = written(tmp_path, "bge-small-zh-v1.5")
    with raises(PairError, "pair_not_exported", pair=path):
        create_app(settings.model_copy(update={"pair": str(path)}))


@pytest.mark.parametrize("server", ["chat", "rerank"])
def test_a_missing_package_of_a_server_is_named_with_the_command_that_installs_it(
    settings: Settings, manifest: IndexManifest, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"service.pipeline.{server}_server", raising=False)
    monkeypatch.setitem(sys.modules, "httpx2", None)
    changes = {f"{server}_url": SecretStr("http://host"), "chat_model": "m"}
    with raises(ProviderError, "missing_package", package="httpx2") as caught:
        create_app(settings.model_copy(update=changes), BigramEncoder())
    assert f"care-retrieval[{server}]" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"index": "other"}, "no_active_version"),
        ({"pair": "missing"}, "unknown_pair"),
        ({}, "missing_file"),
    ],
)
def test_missing_weights_are_reported_after_wrong_names(
    settings: Settings, manifest: IndexManifest, pair: Path, changes: dict[str, str], code: str
) -> None:
    with raises(CareError, code):
        create_app(settings.model_copy(update={"pair": str(pair), **changes}))


def test_a_failure_of_a_late_step_leaves_no_thread_behind(
    settings: Settings, manifest: IndexManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a step after the index is loaded")

    monkeypatch.setattr("service.app.Metrics.register_routes", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError):
        create_app(settings, BigramEncoder())
    assert set(threading.enumerate()) == before


def test_the_warm_up_is_bounded_as_batches_are(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[ProviderOptions] = []

    class Encoder:
        def __init__(self, *arguments: Any) -> None:
            loaded.append(arguments[-1])

        def warm_up(self) -> None: ...

    monkeypatch.setattr("service.app.OnnxEncoder", Encoder)
    for chosen in (4096, 512):
        load_query_encoder(settings.model_copy(update={"batch_tokens": chosen}))
    assert [options.batch_tokens for options in loaded] == [4096, 512]
