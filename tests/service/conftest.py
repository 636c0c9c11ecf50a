import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from core.documents import FILE_NAME, DocumentReader
from core.encoders import Encoding, QueryEncoder
from core.manifest import IndexManifest
from core.text import document_text
from core.types import FloatArray
from indexer.build import build
from service.app import create_app
from service.settings import Settings
from stores.base import ScoredRows
from tests.conftest import make_records, make_settings, write_jsonl
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options
from tests.service.live import HeldLive

ADMIN = {"Authorization": "Bearer secret"}
BLOCKED = "等待"
# Ids that a corpus may have and that mean something in URLs.
UNUSUAL_IDS = [
    *("a/b", "/a", "a/", "a//b", "https://host/a?b=c#d", "a+b", "a b", "a/../b", "..", "."),
    *("高血压/第1号", "😀" * 512, "é", "e\u0301", "a\\b", "a;b", "{id}", '"'),
]

Serve = Callable[..., TestClient]
Sample = tuple[str, frozenset[tuple[str, str]]]


class BlockingEncoder(BigramEncoder):
    """Holds every batch with the text `BLOCKED` until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.release = threading.Event()

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        if BLOCKED in tokens:
            self.entered.set()
            assert self.release.wait(30)
        return super().encode_tokens(tokens)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The event loop of the service."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def fresh_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renders the metrics whenever a test reads them."""
    monkeypatch.setattr("service.observe.metrics.SHARED_SECONDS", 0.0)


def build_in(
    folder: Path, records: Sequence[Mapping[str, Any]], **options: Any
) -> tuple[Path, IndexManifest]:
    """Builds a version of index 'test'; returns the folder of indexes, and its manifest."""
    corpus = write_jsonl(folder / "corpus.jsonl", records)
    settings = build_options(folder, corpus, **options)
    manifest, _ = build(settings, BigramEncoder("document"), BigramEncoder("query"))
    return settings.indexes, manifest


def application(
    settings: Settings,
    encoder: QueryEncoder | None = None,
    overflow: QueryEncoder | None = None,
    writer: str = "",
) -> TestClient:
    """The real application for a client of this machine."""
    return TestClient(
        create_app(settings, encoder or BigramEncoder(), overflow, writer=writer),
        "http://127.0.0.1:8000",
        raise_server_exceptions=False,
        client=("127.0.0.1", 50_000),
    )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, IndexManifest]:
    """A version of 60 documents, built once; tests get a copy."""
    return build_in(tmp_path_factory.mktemp("built"), make_records(60))


@pytest.fixture(scope="session")
def client(built: tuple[Path, IndexManifest]) -> Iterator[TestClient]:
    """The application over 60 documents, for all tests that neither change nor count anything."""
    with application(make_settings(built[0])) as client:
        yield client


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., TestClient]]:
    """Starts such an application over records, with options of a build, for tests of a module."""
    with ExitStack() as stack:

        def start(records: Sequence[Mapping[str, Any]], **options: Any) -> TestClient:
            indexes, _ = build_in(tmp_path_factory.mktemp("over"), records, **options)
            return stack.enter_context(application(make_settings(indexes)))

        yield start


@pytest.fixture
def manifest(settings: Settings, built: tuple[Path, IndexManifest]) -> IndexManifest:
    """A published version of 60 documents."""
    indexes, manifest = built
    shutil.copytree(indexes, settings.indexes, dirs_exist_ok=True)
    return manifest


@pytest.fixture
def folder(settings: Settings, manifest: IndexManifest) -> Path:
    """The folder of the published version."""
    return settings.indexes / "test" / manifest.version


@pytest.fixture
def serve(settings: Settings, built: tuple[Path, IndexManifest]) -> Iterator[Serve]:
    """Starts the application with changed settings, over 60 documents if the test built none."""
    with ExitStack() as stack:

        def start(
            encoder: QueryEncoder | None = None,
            overflow: QueryEncoder | None = None,
            writer: str = "",
            **changes: Any,
        ) -> TestClient:
            if not (settings.indexes / settings.index).exists():
                shutil.copytree(built[0], settings.indexes)
            changed = settings.model_copy(update=changes)
            return stack.enter_context(application(changed, encoder, overflow, writer))

        yield start


@pytest.fixture
def live(tmp_path: Path, manifest: IndexManifest) -> HeldLive:
    """A live index of the published version."""
    return HeldLive(tmp_path)


def post_search(
    client: TestClient, *, status: int = 200, path: str = "/search", **body: Any
) -> Any:
    """Returns the answer to a query."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def read_samples(client: TestClient) -> dict[Sample, float]:
    """The series of the metrics page: name and labels to value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
    }


def sample(client: TestClient, name: str, **labels: str) -> float:
    return read_samples(client)[name, frozenset(labels.items())]


def exact_scores(folder: Path, query: str) -> dict[str, float]:
    """The cosine similarity of each document of a version to a query, by id."""
    documents = list(DocumentReader(folder / FILE_NAME))
    texts = [document_text(document.title, document.text) for document in documents]
    vectors: FloatArray = BigramEncoder("document").encode(texts).vectors
    scores = vectors @ BigramEncoder().encode([query]).vectors[0]
    return dict(zip((document.id for document in documents), scores.tolist(), strict=True))


def by_row(found: ScoredRows) -> ScoredRows:
    """Scored rows in the order of hits, if a row with a lower number has a higher id."""
    order = np.lexsort((found[1], -found[0]))
    return found[0][order], found[1][order]


def ranking(scores: dict[str, float]) -> list[tuple[str, float]]:
    """Ids and scores, best first, ties by descending id."""
    order = sorted(scores, key=lambda id_: (np.float32(scores[id_]), id_), reverse=True)
    return [(id_, scores[id_]) for id_ in order]
