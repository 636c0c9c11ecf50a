"""Documents that cannot be encoded: found, reported, left out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.documents import DocumentReader
from core.encoders import Encoding
from core.errors import CorpusError, ProviderError, TextRefusedError, VectorError
from core.manifest import Chunking, IndexManifest
from core.records import read_jsonl
from core.shards import whole_shards
from core.types import FloatArray
from core.versions import list_versions
from indexer.__main__ import main
from indexer.build import BuildOptions, Encoded, build, encode
from indexer.failures import Isolator
from indexer.update import Changes, active_manifest, update
from indexer.versions import verify_version
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import build_options, state
from tests.indexer.conftest import OptionsMaker
from tests.indexer.dying import POISON, ProcessEncoder

pytestmark = pytest.mark.e2e

Records = list[dict[str, Any]]

COUNT = 60


def poisoned(records: Records, *places: int) -> Records:
    return [
        r | {"text": f"{POISON}{r['text']}"} if i in places else r for i, r in enumerate(records)
    ]


def without(records: Records, *places: int) -> Records:
    return [record for i, record in enumerate(records) if i not in places]


def run(options: BuildOptions, encoder: BigramEncoder) -> tuple[IndexManifest, Encoded]:
    return build(options, encoder, BigramEncoder("query"))


def listed(encoded: Encoded, name: str = "failed.jsonl") -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(encoded.folder / name)]


@pytest.mark.parametrize("places", [(37,), (0, 20, 59), (16, 17, 18, 19)])
def test_a_build_without_the_documents_that_kill_the_encoder(
    options: OptionsMaker, build_version: Builder, places: tuple[int, ...]
) -> None:
    settings = options(poisoned(make_records(COUNT), *places), max_reject_rate=0.1)
    with ProcessEncoder() as encoder:
        manifest, encoded = run(settings, encoder)
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
    """Computes no number for a poisoned text, as half precision may."""

    def _vector(self, text: str) -> FloatArray:
        vector = super()._vector(text)
        return vector * np.float32(np.nan) if POISON in text else vector


def test_a_text_whose_vector_is_no_number_is_left_out(
    options: OptionsMaker, build_version: Builder
) -> None:
    settings = options(poisoned(make_records(COUNT), 37), max_reject_rate=0.1)
    manifest, encoded = run(settings, OverflowingEncoder("document"))
    assert list(encoded.reasons) == ["d0037"]
    assert manifest.files == build_version(without(make_records(COUNT), 37)).files


def test_an_encoder_that_stumbles_refuses_nothing(
    options: OptionsMaker, build_version: Builder
) -> None:
    with ProcessEncoder(stumbles=(0, 3, 9, 10)) as encoder:
        manifest, encoded = run(options(make_records(COUNT)), encoder)
    assert encoder.deaths == 4
    assert encoded.reasons == {}
    assert manifest.files == build_version(make_records(COUNT)).files


def test_all_documents_of_a_text_are_left_out_and_counted(options: OptionsMaker) -> None:
    records = poisoned(make_records(COUNT), 5)
    records += [records[5] | {"_id": "copy"}, records[6] | {"_id": "other"}]
    with ProcessEncoder() as encoder:
        manifest, encoded = run(options(records, max_reject_rate=0.1), encoder)
    assert list(encoded.reasons) == ["d0005", "copy"]
    assert (manifest.corpus.documents, manifest.corpus.rejected) == (COUNT, 2)
    assert manifest.corpus.unique_texts == COUNT - 1
    # Of 62 records 2 are more than 2 %, though it is one text.
    with raises(CorpusError, "too_many_rejects", rejected=2, total=62):
        run(options(records, max_reject_rate=0.02), BigramEncoder("document"))


def test_a_document_is_left_out_with_all_its_chunks(options: OptionsMaker, indexes: Path) -> None:
    records = [{"_id": f"d{i}", "text": f"第{i}篇说明。" * 2 * i} for i in range(1, 11)]
    records[6]["text"] += f"{POISON}。"
    settings = options(records, chunking=Chunking(tokens=30, overlap=8), max_reject_rate=0.1)
    with ProcessEncoder() as encoder:
        manifest, encoded = run(settings, encoder)
    rows = list(DocumentReader(indexes / "test" / manifest.version / "documents.arrow"))
    assert list(encoded.reasons) == ["d7"]
    assert {row.parent for row in rows} == {f"d{i}" for i in range(1, 11)} - {"d7"}
    assert (manifest.corpus.documents, manifest.corpus.chunks) == (9, len(rows))
    assert manifest.count == len(rows)


def test_what_was_refused_is_remembered(options: OptionsMaker) -> None:
    records = poisoned(make_records(COUNT), 3, 40)
    settings = options(records, max_reject_rate=0.1)
    with ProcessEncoder() as encoder:
        first, encoded = run(settings, encoder)
    assert [list(record.failed) for record in whole_shards(encoded.folder)] == [[3], [], [8], []]
    again = BigramEncoder("document")
    second, resumed = run(settings, again)
    assert again.texts_seen == 0
    assert second.files == first.files
    assert resumed.reasons == encoded.reasons
    # A shard that is encoded again may refuse other texts.
    (encoded.folder / "shard-00002.ids").unlink()
    third, healed = run(settings, BigramEncoder("document"))
    assert list(healed.reasons) == ["d0003"]
    assert third.corpus.documents == COUNT - 1


def test_more_refused_texts_than_records_may_be_rejected_end_the_build(
    options: OptionsMaker, indexes: Path
) -> None:
    records = [*poisoned(make_records(COUNT), 3, 40), {"_id": "bad"}]
    expected = {"id": "d0040", "count": 2, "allowed": 1}
    with (
        ProcessEncoder() as encoder,
        raises(VectorError, "too_many_failures", **expected) as caught,
    ):
        run(options(records, max_reject_rate=0.04), encoder)
    assert POISON not in str(caught.value)
    assert list_versions(indexes, "test") == []
    # What was encoded before is kept.
    with ProcessEncoder() as encoder:
        manifest, encoded = run(options(records, max_reject_rate=0.05), encoder)
    assert encoded.summary.resumed_texts == 32
    assert (manifest.corpus.documents, manifest.corpus.rejected) == (COUNT - 2, 3)
    assert [record["line"] for record in listed(encoded, "rejects.jsonl")] == [61]
    assert [record["id"] for record in listed(encoded)] == ["d0003", "d0040"]


def test_a_broken_encoder_ends_the_build_and_rejects_nothing(options: OptionsMaker) -> None:
    settings = options(make_records(COUNT), max_reject_rate=1)
    with (
        ProcessEncoder(poison="") as encoder,
        raises(ProviderError, "encoder_fails"),
    ):
        encode(settings, encoder)
    assert encoder.batches == [4, 4, 1]


def test_an_encoder_that_fails_at_text_after_text_ends_the_build(options: OptionsMaker) -> None:
    settings = options(make_records(COUNT), max_reject_rate=1)
    with (
        ProcessEncoder(poison="患者") as encoder,
        raises(ProviderError, "too_many_failures_in_a_row"),
    ):
        encode(settings, encoder)


def test_failures_between_texts_that_are_encoded_are_not_in_a_row() -> None:
    def take(texts: Sequence[str]) -> Encoding:
        if any(POISON in text for text in texts):
            raise ProviderError("no")
        return BigramEncoder("document").encode(texts)

    isolator = Isolator(take)
    for _ in range(20):
        found = isolator.encode([POISON, "药"], ProviderError("no"))
        assert (list(found.failed), [part for part, _ in found.parts]) == ([0], [[1]])
    for _ in range(20):
        isolator.succeeded()
        assert list(isolator.encode([POISON], ProviderError("no")).failed) == [0]
    with raises(ProviderError, "too_many_failures_in_a_row"):
        isolator.encode([POISON] * 16, ProviderError("no"))


class RefusingServer(BigramEncoder):
    """Says which text of a batch it refuses first, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__("document")
        self.texts_asked = 0

    def encode(self, texts: Sequence[str]) -> Encoding:
        self.texts_asked += len(texts)
        for position, text in enumerate(texts):
            if POISON in text:
                raise TextRefusedError("it is too long", position)
        return super().encode(texts)


def test_texts_that_a_server_refuses_are_left_out_however_many_follow_each_other(
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
    # Far from all texts again for each that is refused.
    assert encoder.texts_asked < 8 * COUNT


def test_an_update_without_a_document_that_kills_the_encoder(
    tmp_path: Path, build_version: Builder
) -> None:
    records = make_records(COUNT + 10)
    build_version(records[:COUNT])
    added = [*poisoned(records[COUNT:], 4), records[7] | {"text": f"{POISON}新"}]
    changes = Changes(str(write_jsonl(tmp_path / "new.jsonl", added)))
    before = state(tmp_path / "indexes")

    def change(encoder: BigramEncoder, **more: Any) -> tuple[IndexManifest, Encoded]:
        settings = build_options(tmp_path, Path("unread"), **more)
        base = active_manifest(settings.indexes, "test")
        result = update(settings, changes, base, encoder, BigramEncoder("query"))
        assert result
        return result

    # Of the 11 that are added, not of all 70.
    with ProcessEncoder() as encoder, raises(VectorError, "too_many_failures"):
        change(encoder, max_reject_rate=0.1)
    assert state(tmp_path / "indexes") == before
    with ProcessEncoder() as encoder:
        manifest, encoded = change(encoder, max_reject_rate=0.2)
    assert set(encoded.reasons) == {"d0064", "d0007"}
    assert manifest.corpus.checksum == manifest.files["documents.arrow"].sha256
    assert manifest.corpus.rejected == 2
    assert manifest.files == build_version(without(records, 7, 64)).files


def test_an_update_finds_the_vectors_of_a_lossy_version_that_leaves_documents_out(
    tmp_path: Path, options: OptionsMaker
) -> None:
    records = make_records(COUNT + 10)
    index = {"factory": "HNSW8,SQ8", "recall": 0.9}
    with ProcessEncoder() as encoder:
        run(options(poisoned(records[:COUNT], 3, 59), max_reject_rate=0.1, **index), encoder)
    settings = build_options(tmp_path, Path("unread"), **index)
    changes = Changes(str(write_jsonl(tmp_path / "new.jsonl", records[COUNT:])))
    plain = BigramEncoder("document")
    base = active_manifest(settings.indexes, "test")
    result = update(settings, changes, base, plain, BigramEncoder("query"))
    assert result
    assert plain.texts_seen == 10
    assert result[0].count == COUNT + 8


def test_a_corpus_of_which_nothing_can_be_encoded_is_no_index(options: OptionsMaker) -> None:
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
    monkeypatch.setattr("indexer.__main__.document_encoder", lambda *_: RefusingServer())
    corpus = write_jsonl(tmp_path / "corpus.jsonl", poisoned(make_records(200), 150))
    folders = ["--indexes", str(tmp_path / "indexes"), "--builds", str(tmp_path / "builds")]
    command = ["build", "--index", "test", "--corpus", str(corpus), "--pair", str(pair_file)]
    assert main([*command, *folders]) == 0
    output = capsys.readouterr().out
    assert "199 documents" in output
    assert "1 rejected" in output
    (failed,) = (tmp_path / "builds").glob("test/*/failed.jsonl")
    assert all(part in output for part in ("'d0150'", "it is too long", str(failed)))
    assert json.loads(failed.read_text("utf-8")) == {"id": "d0150", "reason": "it is too long"}
    version = verify_version(next((tmp_path / "indexes" / "test").glob("*-*")))
    assert version.count == 199
