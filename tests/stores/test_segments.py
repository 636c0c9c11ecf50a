import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import faiss
import numpy as np
import pytest
from pyroaring import BitMap

from core import documents, filters
from core.documents import DocumentReader, DocumentWriter
from core.encoders import TokenVectorSpec
from core.filters import FilterReader, FilterWriter, Selection
from core.manifest import VECTORS_FILE
from core.rows import Rows
from core.types import Condition, Conjunction, Document, FloatArray
from models.late_interaction import encode_tokens
from stores.faiss.search import FaissVectors
from stores.order import rounded
from stores.segment import Segment
from stores.segments import (
    JoinedDocuments,
    JoinedFilters,
    JoinedTokens,
    JoinedVectors,
    RowMap,
    join_small,
)
from stores.token_vectors import TokenVectors, write_token_vectors

COUNT, DIMENSION = 60, 8
TOKENS = TokenVectorSpec(space="t", dimension=DIMENSION, pooling=1, codec="int8")
CONDITIONS = [
    ("department", Condition(accepted=("儿科", "骨科"))),
    ("department", Condition(excluded=("儿科",))),
    ("year", Condition(bounds=(("gte", 3), ("lt", 7)))),
    ("tags", Condition(accepted=("门诊",))),
    ("flag", Condition(accepted=(True,))),
    ("flag", Condition(accepted=(1,))),
    ("rare", Condition(accepted=("only",))),
    ("missing", Condition(accepted=("x",))),
]


def make_documents(random: Random) -> list[Document]:
    made = []
    while len(made) < COUNT:
        chunks = random.choice([1, 1, 2, 3])
        id_ = f"d{len(made):03}"
        metadata = {
            "department": random.choice(["儿科", "骨科", "内科"]),
            "year": random.choice([1, 3, 3.0, 5.5, 9, 2**60]),
            "tags": random.sample(["门诊", "急诊", "住院"], 2),
            "flag": random.choice([True, False, 1, "true"]),
        }
        if not made:
            metadata["rare"] = "only"
        for chunk in range(chunks):
            own = f"{id_}#{chunk}" if chunks > 1 else id_
            parent = id_ if chunks > 1 else None
            made.append(Document(own, f"文{id_}", "题", metadata, parent or id_, chunk, chunks))
    return made


def write(
    folder: Path, own: list[Document], vectors: FloatArray, *, graph: bool
) -> tuple[Segment, dict[str, int]]:
    """Writes and opens a segment without full text, and its filter fields."""
    folder.mkdir()
    with (
        DocumentWriter(folder / documents.FILE_NAME, chunked=True) as writer,
        FilterWriter(folder / filters.FILE_NAME) as values,
    ):
        for row, document in enumerate(own):
            writer.write(document)
            values.add(row, document.metadata)
    fields = values.fields()
    index = faiss.IndexHNSWFlat(DIMENSION, 4, faiss.METRIC_INNER_PRODUCT) if graph else None
    index = index or faiss.IndexFlatIP(DIMENSION)
    index.add(vectors)
    faiss.write_index(index, str(folder / VECTORS_FILE))
    tokens = (encode_tokens(np.stack([vector, -vector]), TOKENS.codec) for vector in vectors)
    write_token_vectors(folder, tokens, TOKENS)
    opened = Segment(
        DocumentReader(folder / documents.FILE_NAME),
        FilterReader(folder / filters.FILE_NAME, fields, len(own)),
        FaissVectors(folder / VECTORS_FILE, {"efSearch": 64} if graph else {}),
        None,
        TokenVectors(Rows.open(folder / "tokens", "vectors", np.uint8), TOKENS),
    )
    return opened, fields


def joined(parts: list[Segment], fields: dict[str, int], deleted: BitMap) -> Segment:
    rows = RowMap([part.count for part in parts], deleted)
    vectors = join_small([part.vectors for part in parts])
    return Segment(
        JoinedDocuments([part.documents for part in parts], rows),
        JoinedFilters([part.filters for part in parts], fields, rows),
        JoinedVectors(vectors, RowMap([part.count for part in vectors], deleted)),
        None,
        JoinedTokens([part.tokens for part in parts if part.tokens], rows),
    )


def ends(own: list[Document], random: Random) -> list[int]:
    """Where segments end: at the ends of documents."""
    whole = [at for at in range(1, len(own)) if own[at].chunk == 0]
    return [0, *sorted(random.sample(whole, random.randrange(4))), len(own)]


@pytest.fixture(params=range(6))
def segments(request: Any, tmp_path: Path) -> Iterator[tuple[Segment, Segment, list[int]]]:
    """All documents as one segment and as several, and the rows that are deleted in these."""
    random = Random(request.param)
    own = make_documents(random)
    vectors = np.random.default_rng(request.param).normal(size=(len(own), DIMENSION))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    vectors[5:9] = vectors[5]  # tied
    whole, fields = write(tmp_path / "whole", own, vectors, graph=False)
    parts = [
        write(tmp_path / str(at), own[start:end], vectors[start:end], graph=not start)[0]
        for at, (start, end) in enumerate(pairwise(ends(own, random)))
    ]
    parents = [document.parent for document in own]
    gone = set(random.sample(sorted(set(filter(None, parents))), random.choice([0, 3, 20])))
    deleted = [row for row, parent in enumerate(parents) if parent in gone]
    yield whole, joined(parts, fields, BitMap(deleted)), deleted


def test_rows_have_the_documents_of_one_segment(
    segments: tuple[Segment, Segment, list[int]],
) -> None:
    whole, several, deleted = segments
    assert several.count == whole.count
    for row, document in enumerate(whole.documents):
        (found,), (expected,) = several.documents.read([row]), whole.documents.read([row])
        assert found.document() == several.documents[row] == document
        assert (found.id, found.title, found.text) == (document.id, document.title, document.text)
        assert (found.json(), found.metadata) == (expected.json(), document.metadata)
        gone = range(0) if row in deleted else whole.documents.find(document.id)
        assert several.documents.find(document.id) == gone
        parent = whole.documents.find(document.parent or "")
        assert several.documents.find(document.parent or "") == (
            range(0) if row in deleted else parent
        )
    rows = np.random.default_rng(1).permutation(whole.count)
    stored = several.documents.read([*rows.tolist(), int(rows[0])])
    assert [one.document() for one in stored] == [whole.documents[row] for row in [*rows, rows[0]]]
    assert np.array_equal(several.documents.first_chunks(rows), whole.documents.first_chunks(rows))
    live = [(row, one) for row, one in enumerate(whole.documents) if row not in deleted]
    assert list(several.documents.numbered()) == live
    assert [*several.documents] == [document for _, document in live]
    gone = {whole.documents[row].parent for row in deleted}
    for start in (0, 7, whole.count - 1, whole.count):
        expected = [one for one in whole.documents.listed(start, COUNT) if one.id not in gone]
        assert several.documents.listed(start, COUNT) == expected
        assert several.documents.listed(start, 3) == expected[:3]
    with pytest.raises(IndexError):
        several.documents.read([0, whole.count])


def test_ids_are_found_within_rows_only(segments: tuple[Segment, Segment, list[int]]) -> None:
    whole, several, _ = segments
    conditions = Conjunction.of([CONDITIONS[0]])
    within = several.filters.rows(conditions)
    for document in whole.documents:
        expected = several.documents.find(document.id)
        if not np.isin(list(expected), within).any():
            expected = range(0)
        assert several.documents.find(document.id, within) == expected


@pytest.mark.parametrize("field, condition", CONDITIONS)
def test_filters_are_those_of_one_segment(
    segments: tuple[Segment, Segment, list[int]], field: str, condition: Condition
) -> None:
    whole, several, deleted = segments
    conditions = Conjunction.of([(field, condition)])
    live = ~np.isin(np.arange(whole.count), deleted)
    expected = whole.filters.rows(conditions)
    expected = expected[live[expected]]
    for _ in range(2):  # the second time they are kept
        assert np.array_equal(several.filters.rows(conditions), expected)
    one, other = (each.filters.hashed(conditions) for each in (whole, several))
    assert [(sorted(r.hashes), r.excluded) for r in one] == [
        (sorted(r.hashes), r.excluded) for r in other
    ]
    assert several.filters.fields == whole.filters.fields
    assert several.filters.has_numbers("year")
    assert not several.filters.has_numbers("tags")


def test_counts_of_values_leave_out_deleted_rows(
    segments: tuple[Segment, Segment, list[int]],
) -> None:
    whole, several, deleted = segments
    live = np.setdiff1d(np.arange(whole.count), deleted)
    expected = whole.filters.values_within(live)
    assert json.dumps(several.filters.values_within(live)) == json.dumps(expected)
    assert json.dumps(several.filter_values) == json.dumps(expected[0])


@pytest.mark.parametrize("k", [1, 5, 12, COUNT * 2])
def test_the_nearest_rows_are_those_of_one_segment(
    segments: tuple[Segment, Segment, list[int]], k: int
) -> None:
    whole, several, deleted = segments
    live = np.setdiff1d(np.arange(whole.count), deleted)
    queries = np.concatenate(
        [whole.vectors.take(np.array([5, 20, 33])), -whole.vectors.take(live[:2])]
    )
    together = several.vectors.search_together(queries, k)
    chosen = live[::3]
    for at, query in enumerate(queries):
        scores, rows = whole.vectors.search(query, min(k, len(live)), Selection.of_rows(live))
        expected = dict(zip(rows.tolist(), rounded(scores).tolist(), strict=True))
        found = [several.vectors.search(query, k)]
        if together:
            found.append(together[at])
        for scores, rows in found:
            assert dict(zip(rows.tolist(), rounded(scores).tolist(), strict=True)) == expected
            assert (np.diff(scores) <= 0).all()
        _, rows = several.vectors.search(query, k, Selection.of_rows(chosen))
        _, expected_rows = whole.vectors.search(query, k, Selection.of_rows(chosen))
        assert sorted(rows.tolist()) == sorted(expected_rows.tolist())
    mixed = np.random.default_rng(2).permutation(whole.count)
    assert np.array_equal(several.vectors.take(mixed), whole.vectors.take(mixed))


def test_token_vectors_are_those_of_one_segment(
    segments: tuple[Segment, Segment, list[int]],
) -> None:
    whole, several, _ = segments
    assert whole.tokens and several.tokens
    rows = np.random.default_rng(3).permutation(whole.count)
    query = whole.vectors.take(np.array([0, 7]))
    assert np.array_equal(several.tokens.scores(query, rows), whole.tokens.scores(query, rows))
    assert np.array_equal(several.tokens.row(9), whole.tokens.row(9))
