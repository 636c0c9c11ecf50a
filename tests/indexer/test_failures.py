"""Documents that cannot be encoded are isolated, reported and excluded."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from care.cli.main import main
from core.documents import DocumentReader
from core.encoders import Encoding
from core.errors import CorpusError, ProviderError, TextRejectedError, VectorError
from core.manifest import Chunking, IndexManifest
from core.records import read_jsonl
from core.shards import complete_shards
from core.types import FloatArray
from core.versions import IndexFolder
from indexer.build import BuildOptions, EncodedCorpus, build, encode
from indexer.failures import FailureIsolator
from indexer.publication import verify_version
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import state
from tests.indexer.conftest import Index, OptionsMaker, Records
from tests.indexer.crashing import POISON, CrashingEncoder

pytestmark = pytest.mark.e2e

COUNT = 60


def poisoned(records: Records, *places: int) -> Records:
    return [
        r | {"text": f"{POISON}{r['text']}"} if i in places else r for i, r in enumerate(records)
    ]


def without(records: Records, *places: int) -> Records:
    return [record for i, record in enumerate(records) if i not in places]


def run(
    options: BuildOptions, encoder: BigramEncoder | None = None
) -> tuple[IndexManifest, EncodedCorpus]:
    """Builds a version, with an encoder that poisoned texts crash unless another one is given."""
    with CrashingEncoder() as crashing:
        return build(options, encoder or crashing, BigramEncoder("query"))


def listed(encoded: EncodedCorpus, name: str = "failed.jsonl") -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(encoded.folder / name)]


@pytest.mark.parametrize("places", [(37,), (0, 20, 59), (16, 17, 18, 19)])
def test_documents_that_crash_the_encoder_are_not_indexed(
    options: OptionsMaker, build_version: Builder, places: tuple[int, ...]
) -> None:
    settings = options(poisoned(make_records(COUNT), *places), max_reject_rate=0.1)
    manifest, encoded = run(settings)
    assert list(encoded.reasons) == [f"d{place:04d}" for place in places]
    assert [record["id"] for record in listed(encoded)] == list(encoded.reasons)
    assert [record["reason"] for record in listed(encoded)] == list(encoded.reasons.values())
    assert (manifest.corpus.documents, manifest.corpus.rejected) == (
        COUNT - len(places),
        len(places),
    )
    expected = build_version(without(make_records(COUNT), *places))
    assert manifest.files == expected.files
    assert manifest.filter_fields == expected.filter_fields
    assert manifest.corpus.tokens == expected.corpus.tokens
    assert manifest.corpus.unique_texts == expected.corpus.unique_texts


class OverflowingEncoder(BigramEncoder):
    """Computes NaN for a poisoned text, as half precision can."""

    def _vector(self, text: str) -> FloatArray:
        vector = super()._vector(text)
        return vector * np.float32(np.nan) if POISON in text else vector


def test_a_text_with_a_nan_vector_is_not_indexed(
    options: OptionsMaker, build_version: Builder
) -> None:
    settings = options(poisoned(make_records(COUNT), 37), max_reject_rate=0.1)
    manifest, encoded = run(settings, OverflowingEncoder("document"))
    assert list(encoded.reasons) == ["d0037"]
    assert manifest.files == build_version(without(make_records(COUNT), 37)).files


def test_a_transient_failure_excludes_no_document(
    options: OptionsMaker, build_version: Builder
) -> None:
    with CrashingEncoder(crashes_at=(0, 3, 9, 10)) as encoder:
        manifest, encoded = run(options(make_records(COUNT)), encoder)
    assert encoder.crashes == 4
    assert encoded.reasons == {}
    assert manifest.files == build_version(make_records(COUNT)).files


def test_all_documents_with_a_failed_text_are_excluded_and_counted(options: OptionsMaker) -> None:
    records = poisoned(make_records(COUNT), 5)
    records += [records[5] | {"_id": "copy"}, records[6] | {"_id": "other"}]
    manifest, encoded = run(options(records, max_reject_rate=0.1))
    assert list(encoded.reasons) == ["d0005", "copy"]
    assert (manifest.corpus.documents, manifest.corpus.rejected) == (COUNT, 2)
    assert manifest.corpus.unique_texts == COUNT - 1
    # 2 of 62 records are more than 2 %, although they share one text.
    with raises(CorpusError, "too_many_rejects", rejected=2, total=62):
        run(options(records, max_reject_rate=0.02), BigramEncoder("document"))


def test_a_document_is_excluded_with_all_its_chunks(options: OptionsMaker, indexes: Path) -> None:
    records = [{"_id": f"d{i}", "text": f"第{i}篇说明。" * 2 * i} for i in range(1, 11)]
    records[6]["text"] += f"{POISON}。"
    settings = options(records, chunking=Chunking(tokens=30, overlap=8), max_reject_rate=0.1)
    manifest, encoded = run(settings)
    rows = list(DocumentReader(indexes / "test" / manifest.version / "documents.arrow"))
    assert list(encoded.reasons) == ["d7"]
    assert {row.parent for row in rows} == {f"d{i}" for i in range(1, 11)} - {"d7"}
    assert (manifest.corpus.documents, manifest.corpus.chunks) == (9, len(rows))
    assert manifest.count == len(rows)


def test_failed_texts_are_stored_and_not_tried_again(options: OptionsMaker) -> None:
    records = poisoned(make_records(COUNT), 3, 40)
    settings = options(records, max_reject_rate=0.1)
    first, encoded = run(settings)
    assert [list(record.failed) for record in complete_shards(encoded.folder)] == [[3], [], [8], []]
    again = BigramEncoder("document")
    second, resumed = run(settings, again)
    assert again.texts_seen == 0
    assert second.files == first.files
    assert resumed.reasons == encoded.reasons
    # Other texts may fail if the shard is encoded again.
    (encoded.folder / "shard-00002.ids").unlink()
    third, healed = run(settings, BigramEncoder("document"))
    assert list(healed.reasons) == ["d0003"]
    assert third.corpus.documents == COUNT - 1


def test_more_failed_texts_than_allowed_stop_the_build(
    options: OptionsMaker, indexes: Path
) -> None:
    records = [*poisoned(make_records(COUNT), 3, 40), {"_id": "bad"}]
    expected = {"id": "d0040", "count": 2, "allowed": 1}
    with raises(VectorError, "too_many_failures", **expected) as caught:
        run(options(records, max_reject_rate=0.04))
    assert POISON not in str(caught.value)
    assert IndexFolder(indexes, "test").versions() == []
    # Encoded shards are kept.
    manifest, encoded = run(options(records, max_reject_rate=0.05))
    assert encoded.summary.resumed_texts == 32
    assert (manifest.corpus.documents, manifest.corpus.rejected) == (COUNT - 2, 3)
    assert [record["line"] for record in listed(encoded, "rejects.jsonl")] == [61]
    assert [record["id"] for record in listed(encoded)] == ["d0003", "d0040"]


@pytest.mark.parametrize(
    ("poison", "code"), [("", "encoder_fails"), ("患者", "too_many_failures_in_a_row")]
)
def test_an_encoder_that_fails_at_every_text_stops_the_build(
    options: OptionsMaker, poison: str, code: str
) -> None:
    settings = options(make_records(COUNT), max_reject_rate=1)
    with CrashingEncoder(poison=poison) as encoder, raises(ProviderError, code):
        encode(settings, encoder)
    assert poison or encoder.batches == [4, 4, 1]


def test_encoded_texts_reset_the_count_of_consecutive_failures() -> None:
    def take(texts: Sequence[str]) -> Encoding:
        if any(POISON in text for text in texts):
            raise ProviderError("no")
        return BigramEncoder("document").encode(texts)

    isolator = FailureIsolator(take)
    for _ in range(20):
        found = isolator.encode([POISON, "药"], ProviderError("no"))
        assert (list(found.failed), [part for part, _ in found.parts]) == ([0], [[1]])
    for _ in range(20):
        isolator.succeeded()
        assert list(isolator.encode([POISON], ProviderError("no")).failed) == [0]
    with raises(ProviderError, "too_many_failures_in_a_row"):
        isolator.encode([POISON] * 16, ProviderError("no"))


class RefusingServer(BigramEncoder):
    """Rejects the first poisoned text of a batch and counts calls."""

    def __init__(self) -> None:
        super().__init__("document")
        self.texts_asked = 0

    def encode(self, texts: Sequence[str]) -> Encoding:
        self.texts_asked += len(texts)
        for position, text in enumerate(texts):
            if POISON in text:
                raise TextRejectedError("it is too long", position)
        return super().encode(texts)


def test_any_number_of_consecutive_texts_can_be_rejected_by_a_server(
    options: OptionsMaker, build_version: Builder
) -> None:
    places = range(20, 44)
    encoder = RefusingServer()
    settings = options(
        poisoned(make_records(COUNT), *places), max_reject_rate=0.5, batch_size=64, shard_size=64
    )
    manifest, encoded = run(settings, encoder)
    assert set(encoded.reasons.values()) == {"it is too long"}
    assert manifest.files == build_version(without(make_records(COUNT), *places)).files
    # Far fewer than all texts again for each rejected one.
    assert encoder.texts_asked < 8 * COUNT


def test_an_update_excludes_a_document_that_crashes_the_encoder(index: Index) -> None:
    records = make_records(COUNT + 10)
    index.build(records[:COUNT])
    added = [*poisoned(records[COUNT:], 4), records[7] | {"text": f"{POISON}新"}]
    before = state(index.options.indexes)
    with CrashingEncoder() as encoder:
        # The rate refers to the 11 added documents, not to all 70.
        with raises(VectorError, "too_many_failures"):
            index.update(added, encoder=encoder, max_reject_rate=0.1)
        assert state(index.options.indexes) == before
        manifest, encoded, _ = index.update(added, encoder=encoder, max_reject_rate=0.2)
    assert set(encoded.reasons) == {"d0064", "d0007"}
    assert manifest.corpus.rejected == 2
    texts = {one.id: one.text for one in index.open(manifest).documents}
    # A document that cannot be encoded does not replace the one that is there.
    assert texts == {one["_id"]: one["text"] for one in records if one["_id"] != "d0064"}


def test_an_update_reuses_the_vectors_of_a_lossy_version_with_excluded_documents(
    index: Index, options: OptionsMaker
) -> None:
    records = make_records(COUNT + 10)
    settings = {"factory": "HNSW8,SQ8", "recall": 0.9}
    run(options(poisoned(records[:COUNT], 3, 59), max_reject_rate=0.1, **settings))
    manifest, _, texts = index.update(records[COUNT:], **settings)
    assert (texts, manifest.count) == (10, COUNT + 8)


def test_a_corpus_whose_documents_all_fail_is_an_error(options: OptionsMaker) -> None:
    settings = options(poisoned(make_records(2), 0, 1), max_reject_rate=1)
    with raises(CorpusError, "nothing_encoded"):
        run(settings, RefusingServer())


@pytest.mark.usefixtures("test_encoders")
def test_the_command_names_a_document_that_cannot_be_encoded(
    tmp_path: Path,
    pair_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("care.indexing.document_encoder", lambda *_: RefusingServer())
    corpus = write_jsonl(tmp_path / "corpus.jsonl", poisoned(make_records(200), 150))
    folders = ["--indexes", str(tmp_path / "indexes"), "--builds", str(tmp_path / "builds")]
    command = ["index", str(corpus), "--index", "test", "--pair", str(pair_file)]
    assert main([*command, *folders]) == 0
    output = capsys.readouterr().out
    assert "199 documents" in output
    assert "1 rejected" in output
    (failed,) = (tmp_path / "builds").glob("test/*/failed.jsonl")
    assert all(part in output for part in ("'d0150'", "it is too long", str(failed)))
    assert json.loads(failed.read_text("utf-8")) == {"id": "d0150", "reason": "it is too long"}
    version = verify_version(next((tmp_path / "indexes" / "test").glob("*-*")))
    assert version.count == 199
