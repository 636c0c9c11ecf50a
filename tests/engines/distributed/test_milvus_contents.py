"""What docs/milvus.md relies on: weights of full text, filters of snapshots, kept writes."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from pymilvus import DataType, MilvusClient

from core.analysis import terms
from core.documents import FILE_NAME, DocumentReader
from core.text import document_text
from core.versions import read_manifest
from indexer.build import build
from stores.lexical import idf, open_full_text
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.engines.distributed.milvus_server import MilvusAt, MilvusServer
from tests.indexer.builds import build_options

NAME = "contents"
K1, B = 1.2, 0.75


def create(client: MilvusClient, field: DataType, **params: Any) -> None:
    schema = client.create_schema(auto_id=False)
    schema.add_field("row", DataType.INT64, is_primary=True)
    schema.add_field("field", field, **params)
    schema.add_field("born", DataType.INT64)
    index = client.prepare_index_params()
    kind = "FLAT" if field == DataType.FLOAT_VECTOR else "SPARSE_INVERTED_INDEX"
    index.add_index("field", index_type=kind, metric_type="IP")
    client.create_collection(NAME, schema=schema, index_params=index)


def rows(client: MilvusClient, expression: str) -> list[int]:
    found = client.query(NAME, filter=expression, output_fields=["row"], consistency_level="Strong")
    return sorted(entity["row"] for entity in found)


def test_inner_products_of_own_weights_are_the_scores_of_full_text(
    milvus: MilvusAt, tmp_path: Path
) -> None:
    # Up to 40 terms, Tantivy stores the length of a document exactly.
    records = [record | {"title": "", "text": record["text"][:12]} for record in make_records(60)]
    options = build_options(tmp_path, write_jsonl(tmp_path / "corpus.jsonl", records))
    version = build(options, BigramEncoder("document"), BigramEncoder("query"))[0].version
    folder = options.index.path / version
    files = open_full_text(folder, read_manifest(folder))
    assert files
    texts = [document_text(d.title, d.text) for d in DocumentReader(folder / FILE_NAME)]
    counts = [Counter(terms(text)) for text in texts]
    lengths = [count.total() for count in counts]
    assert max(lengths) <= 40
    having = Counter(term for count in counts for term in count)
    numbers = {term: number for number, term in enumerate(having)}
    norms = K1 * (1 - B + B * np.array(lengths) / np.mean(lengths))
    with milvus.client() as client:
        create(client, DataType.SPARSE_FLOAT_VECTOR)
        for row, (count, norm) in enumerate(zip(counts, norms, strict=True)):
            weights = {numbers[term]: n / (n + norm) for term, n in count.items()}
            client.insert(NAME, [{"row": row, "field": weights, "born": 0}])
        for query in (texts[3], texts[40], f"{texts[7]}，{texts[21]}"):
            own = {term: idf(60, having[term]) for term in dict.fromkeys(terms(query))}
            weights = {numbers[term]: value / sum(own.values()) for term, value in own.items()}
            (hits,) = client.search(NAME, [weights], anns_field="field", limit=60)
            scores, found = files.search(query, 60)
            of_milvus = {hit["row"]: hit["distance"] for hit in hits}
            assert of_milvus.keys() == set(found.tolist())
            assert np.allclose([of_milvus[row] for row in found.tolist()], scores, atol=1e-6)


def test_a_filter_keeps_a_reader_at_its_commit(milvus: MilvusAt) -> None:
    with milvus.client() as client:
        create(client, DataType.FLOAT_VECTOR, dim=2)
        entities = [{"row": i, "field": [1.0, i / 10], "born": i // 4} for i in range(10)]
        client.insert(NAME, entities)
        at_1 = "born <= 1 and not (row in [2, 5])"
        (hits,) = client.search(NAME, [[1.0, 1.0]], anns_field="field", limit=10, filter=at_1)
        assert [hit["row"] for hit in hits] == [7, 6, 4, 3, 1, 0]
        client.delete(NAME, filter="born > 1")  # a writer that takes over from a killed one
        client.delete(NAME, ids=[2])
        assert rows(client, at_1) == [0, 1, 3, 4, 6, 7]
        assert rows(client, "row >= 0") == [0, 1, 3, 4, 5, 6, 7]


def test_what_was_acknowledged_is_there_after_a_kill(
    own_milvus: MilvusServer,
) -> None:
    entities: list[dict[str, Any]] = [
        {"row": i, "field": [1.0, 0.0], "born": 1} for i in range(100)
    ]
    with own_milvus.client() as client:
        create(client, DataType.FLOAT_VECTOR, dim=2)
        client.insert(NAME, entities)
        client.upsert(NAME, [entities[3] | {"born": 2}])
        client.delete(NAME, ids=[4])
    own_milvus.kill()
    own_milvus.start()
    with own_milvus.client() as client:
        client.load_collection(NAME)
        assert rows(client, "row >= 0") == [row for row in range(100) if row != 4]
        assert rows(client, "born == 2") == [3]
