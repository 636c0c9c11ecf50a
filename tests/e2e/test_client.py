"""The Python client against the real service: every route, sync and async."""

import asyncio
from collections.abc import Iterator

import pytest

import care
from care_client import AccessError, AsyncClient, Client, DeadlineError, InvalidRequestError
from core.service_process import running_service
from tests.service.conftest import UNUSUAL_IDS

pytestmark = pytest.mark.e2e

QUERY = "血压高的人平时吃饭要注意什么？"


def test_every_route_of_the_service(closed_url: str) -> None:
    with Client(closed_url, api_key="secret") as client:
        assert client.live().status == "live"
        assert client.ready().status == "ready"
        served = client.index()
        assert served.pair == "care-mini" and "department" in served.filters
        assert "hybrid" in served.modes
        result = client.search(QUERY, top_k=3, filter={"department": ["心血管科"]})
        assert [hit.rank for hit in result.hits] == [1, 2, 3]
        assert {hit.metadata["department"] for hit in result.hits if hit.metadata} == {"心血管科"}
        assert result.index.version == served.version
        mixed = client.search(QUERY, mode="hybrid", explain=True)
        assert mixed.mode == "hybrid" and not mixed.failed_channels
        assert mixed.hits[0].explain and mixed.hits[0].explain["lexical"].weight > 0
        document = client.document(result.hits[0].id)
        assert (document.text, document.metadata) == (result.hits[0].text, result.hits[0].metadata)
        assert document.index == result.index
        batch = client.search_batch([QUERY, {"query": "头痛", "include": []}], top_k=2)
        assert batch.results[0].hits[0].text and batch.results[1].hits[0].text is None
        (vector,) = client.embeddings(QUERY).data
        assert len(vector.embedding) == served.dimension
        (model,) = client.models().data
        assert client.model(model.id).id == served.pair
        assert client.reload().version == served.version
        assert "care_index_documents" in client.metrics()


def test_the_async_client_gets_the_same_hits(closed_url: str) -> None:
    async def search() -> list[str]:
        async with AsyncClient(closed_url, api_key="asks") as client:
            results = await asyncio.gather(*(client.search(QUERY, top_k=5) for _ in range(8)))
        ids = {tuple(hit.id for hit in result.hits) for result in results}
        assert len(ids) == 1
        return list(*ids)

    with Client(closed_url, api_key="asks") as client:
        assert [hit.id for hit in client.search(QUERY, top_k=5).hits] == asyncio.run(search())


def test_many_queries_are_sent_in_batches_that_the_service_accepts(closed_url: str) -> None:
    done: list[int] = []
    with Client(closed_url, api_key="asks") as client:
        results = client.search_many(
            [QUERY] * 9, top_k=1, progress=lambda part, _: done.append(part)
        )
    assert len(results) == 9 and len({result.hits[0].id for result in results}) == 1
    assert done == [4, 8, 9]


def test_errors_have_the_codes_and_fields_of_the_service(closed_url: str) -> None:
    with Client(closed_url) as client, pytest.raises(AccessError) as denied:
        client.search(QUERY)
    assert denied.value.code == "unauthorized" and denied.value.request_id
    with Client(closed_url, api_key="asks") as client:
        with pytest.raises(AccessError) as denied:
            client.reload()
        assert denied.value.code == "forbidden"
        with pytest.raises(InvalidRequestError) as unknown:
            client.search(QUERY, filter={"ward": 1})
        assert unknown.value.code == "unknown_filter_field"
        with pytest.raises(InvalidRequestError) as typo:
            client.search(QUERY, **{"topk": 3})
        assert [field.field for field in typo.value.errors] == ["topk"]


# The test client of tests/service decodes twice.
IDS = [*UNUSUAL_IDS, "%2F", "100%", "a%20b"]


@pytest.fixture(scope="module")
def chunks_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service over an index of chunks; each second document is split."""
    folder = tmp_path_factory.mktemp("chunks")
    text = "".join(f"高血压患者第{i}号的护理要点。" for i in range(12))
    documents = [{"_id": id_, "text": text[: 15 + 200 * (i % 2)]} for i, id_ in enumerate(IDS)]
    folders = {"indexes": folder / "indexes", "builds": folder / "builds"}
    care.build_index("chunks", documents, chunk_tokens=64, chunk_overlap=16, **folders)
    with running_service(folder / "indexes", "chunks") as service:
        yield service.url


def test_each_hit_and_its_document_can_be_fetched_whatever_their_ids(chunks_url: str) -> None:
    with Client(chunks_url) as client:
        hits = client.search("护理", top_k=1000).hits
        assert {hit.parent for hit in hits} == set(IDS)
        for hit in hits:
            found = client.document(hit.id)
            assert (found.id, found.text, found.chunk) == (hit.id, hit.text, hit.chunk)
            assert found.parent and not found.passages
        parts = {(hit.id, hit.text) for hit in hits if hit.chunks and hit.chunks > 1}
        assert parts
        split = [client.document(id_) for id_ in IDS[1::2]]
        assert {(p.id, p.text) for document in split for p in document.passages} == parts
        for unknown in ("no-such-id", "", "a", "a#0", "%", "\n", "b\n"):
            with pytest.raises(InvalidRequestError) as caught:
                client.document(unknown)
            assert caught.value.status == 404


def test_an_id_that_is_longer_than_a_url_is_an_error(chunks_url: str) -> None:
    with Client(chunks_url) as client, pytest.raises(InvalidRequestError) as caught:
        client.document("x" * 9000)
    assert (caught.value.status, caught.value.code) == (414, "url_too_long")


def test_the_service_ends_a_request_at_the_deadline_of_the_client(closed_url: str) -> None:
    with Client(closed_url, api_key="asks") as client, pytest.raises(DeadlineError) as late:
        client.search("关节疼痛" * 50, timeout=0.001)
    assert (late.value.status, late.value.code) == (504, "deadline_exceeded")
