from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import care
from core.errors import CareError, CorpusError, VectorError
from core.manifest import TOKENS, Chunking, IndexManifest
from core.shards import complete_shards
from core.text import document_text
from core.writes import Write, Written
from indexer.build import BuildOptions, build, encode, up_to_date
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter
from indexer.update import Changes, active_manifest, merge, update, update_components
from models.late_interaction import encode_tokens, pool_tokens
from stores.faiss.store import FaissStore
from stores.segment import open_segments
from tests.conftest import make_records, write_jsonl
from tests.encoders import LATE_INTERACTION, BigramEncoder, TokenBigramEncoder, token_vectors
from tests.errors import raises
from tests.indexer.builds import only_folder
from tests.indexer.conftest import OptionsMaker

STORED = LATE_INTERACTION.stored
RECORDS = make_records(40)
# Equal texts are encoded once, and have equal token vectors.
RECORDS.append(RECORDS[3] | {"_id": "again"})


@pytest.fixture
def tokens(options: OptionsMaker) -> BuildOptions:
    return options(RECORDS, token_vectors=STORED)


def built(options: BuildOptions) -> IndexManifest:
    return build(options, TokenBigramEncoder("document"), BigramEncoder())[0]


def updated(
    options: BuildOptions, changes: Changes, encoder: BigramEncoder | None = None
) -> IndexManifest:
    base = active_manifest(IndexWriter(options.indexes, options.name))
    document = encoder or TokenBigramEncoder("document")
    result = update(options, changes, base, document, BigramEncoder())
    assert result
    return result[0]


def check(options: BuildOptions, manifest: IndexManifest) -> None:
    """Asserts that a version has the token vectors of each of its documents."""
    folder = options.index.path / manifest.version
    segment = open_segments(folder, manifest, FaissStore()).all
    found = segment.tokens
    assert found
    for row, document in segment.documents.numbered():
        vectors = token_vectors(document_text(document.title, document.text))
        expected = encode_tokens(pool_tokens(vectors, STORED.pooling), STORED.codec)
        np.testing.assert_array_equal(found.row(row), expected)


def test_a_version_has_the_token_vectors_of_each_document(tokens: BuildOptions) -> None:
    manifest = built(tokens)
    assert manifest.components[TOKENS].settings == STORED.model_dump()
    check(tokens, manifest)
    plain = replace(tokens, token_vectors=None)
    assert up_to_date(tokens, manifest.encoder) == manifest
    assert up_to_date(plain, manifest.encoder) is None


def test_a_resumed_build_has_the_same_files(tokens: BuildOptions) -> None:
    first = built(tokens)
    folder = encode(tokens, BigramEncoder("document")).folder
    whole = {path.name: path.read_bytes() for path in folder.glob("shard-*")}
    # The last shard is damaged in its token vectors alone: it is encoded again.
    (folder / "shard-00002.npz").write_bytes(b"")
    assert len(complete_shards(folder)) == 2
    encoder = TokenBigramEncoder("document")
    manifest = build(tokens, encoder, BigramEncoder())[0]
    assert encoder.texts_seen < len(RECORDS) / 2
    assert {path.name: path.read_bytes() for path in folder.glob("shard-*")} == whole
    assert manifest.components == first.components


def test_builds_with_other_token_vectors_share_no_shards(tokens: BuildOptions) -> None:
    built(tokens)
    folder = only_folder(tokens.builds / tokens.name)
    others = replace(tokens, token_vectors=STORED.model_copy(update={"space": "characters-2"}))
    for changed in (others, replace(tokens, token_vectors=None)):
        assert encode(changed, TokenBigramEncoder("document")).folder != folder


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,SQ8"])
def test_an_update_encodes_new_texts_only(
    tokens: BuildOptions, tmp_path: Path, factory: str
) -> None:
    tokens = replace(tokens, factory=factory, recall=0.0)
    built(tokens)
    changed = [RECORDS[5] | {"text": "改了的文字"}, RECORDS[0] | {"_id": "new", "text": "新的"}]
    add = str(write_jsonl(tmp_path / "new.jsonl", changed))
    encoder = TokenBigramEncoder("document")
    manifest = updated(tokens, Changes(add, ["d0007"]), encoder)
    assert encoder.texts_seen == manifest.corpus.unique_texts - manifest.corpus.reused_texts == 2
    check(tokens, manifest)


def test_token_vectors_are_removed_and_added_again(tokens: BuildOptions) -> None:
    base = built(tokens)
    plain = replace(tokens, token_vectors=None)
    removed = update_components(plain, base, base.encoder)
    assert removed and TOKENS not in removed.components
    assert removed.files == base.files
    assert update_components(plain, removed, base.encoder) is None
    # Vectors alone do not suffice: all documents are encoded.
    encoder = TokenBigramEncoder("document")
    manifest = updated(tokens, Changes(), encoder)
    assert manifest.corpus.reused_texts == 0
    check(tokens, manifest)
    with raises(CorpusError, "no_changes"):
        updated(tokens, Changes())


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,SQ8"])
@pytest.mark.parametrize("chunking", [None, Chunking(tokens=60, overlap=0)])
def test_live_writes_keep_token_vectors(
    options: OptionsMaker, factory: str, chunking: Chunking | None
) -> None:
    records = [one | {"text": one["text"] * (3 if chunking else 1)} for one in make_records(20)]
    how = {"token_vectors": STORED, "chunking": chunking, "factory": factory, "recall": 0.0}
    settings = options(records, **how)
    built(settings)
    live = LiveIndex(settings.index, TokenBigramEncoder("document"))

    def one(**parts: Any) -> Written:
        (written,) = live.commit([Write(settings.name, **parts)])
        assert isinstance(written, Written)
        check(settings, active_manifest(settings.index))
        return written

    same_text = records[5] | {"metadata": {"ward": 7}}
    for number in range(9):
        new = records[0] | {"_id": f"n{number}", "title": f"新{number}"}
        assert one(put=(new, same_text)).added == 1
    assert one(patch=(("n1", {"ward": 8}), ("d0003", {"ward": 9}))).replaced == 2
    assert one(delete=("n0", "d0007")).deleted == 2
    assert live.merge()
    check(settings, active_manifest(settings.index))
    merged = merge(settings, active_manifest(settings.index), live._encoder, BigramEncoder())
    assert merged and TOKENS in merged.components
    check(settings, merged)


def test_an_encoder_without_token_vectors_writes_nothing(tokens: BuildOptions) -> None:
    built(tokens)
    live = LiveIndex(tokens.index, BigramEncoder("document"))
    put = Write(tokens.name, put=({"_id": "new", "text": "新的"},))
    failed, deleted = live.commit([put, Write(tokens.name, delete=("d0001",))])
    assert isinstance(failed, CareError) and failed.code == "no_token_output"
    assert isinstance(deleted, Written) and deleted.deleted == 1
    check(tokens, active_manifest(tokens.index))


def test_documents_that_cannot_be_encoded_have_none(options: OptionsMaker) -> None:
    class Failing(TokenBigramEncoder):
        def encode_tokens(self, tokens: Any) -> Any:
            if any("编号0。" in text for text in tokens):
                raise VectorError("not finite", code="not_finite")
            return super().encode_tokens(tokens)

    settings = options(RECORDS, token_vectors=STORED, max_reject_rate=0.1)
    manifest, encoded = build(settings, Failing("document"), BigramEncoder())
    assert list(encoded.reasons) == ["d0000"]
    check(settings, manifest)


def test_a_pair_without_token_vectors(tmp_path: Path) -> None:
    with raises(CareError, "no_token_output", model="care-mini"):
        care.build_index("mine", [{"_id": "1", "text": "a"}], token_vectors=True, builds=tmp_path)
    with raises(CareError, "option_not_taken", option="--token-vectors"):
        care.build_index("mine", [], token_vectors=True, backend="openvino", builds=tmp_path)
