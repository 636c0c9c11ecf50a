"""Estimates of `--dry-run` compared with an actual build."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from care.cli.main import main
from core.errors import CareError, CorpusError
from core.manifest import Chunking
from core.types import Document
from indexer.build import BuildOptions, build
from indexer.chunking import Chunker
from indexer.estimate import (
    CorpusSample,
    EncodingRate,
    Estimate,
    format_estimate,
    measure_rate,
    sample_corpus,
)
from models.encoders.factory import offset_counter
from stores.faiss.factory import index_bytes, reduced_graph
from stores.faiss.training import train_reduced
from tests.conftest import make_records, write_jsonl
from tests.encoders import DIMENSION, BigramEncoder
from tests.errors import error_code, raises
from tests.indexer.builds import build_options
from tests.indexer.conftest import OptionsMaker

MAX_LENGTH = 200
COUNT = BigramEncoder("document")


def estimated(options: BuildOptions, chunker: Chunker | None = None) -> Estimate:
    return CorpusSample(options, chunker).estimate(offset_counter(COUNT, MAX_LENGTH), DIMENSION)


def uneven_records(count: int) -> list[dict[str, Any]]:
    """Records with texts of 1 to 300 characters, longer towards the end; 20,000 exceed 4 MiB."""
    lengths = random.Random(5)
    return [
        {"_id": i, "text": "病" * lengths.randint(1, 100 + 200 * i // count)} for i in range(count)
    ]


def test_a_small_corpus_is_read_completely_and_counted_exactly(options: OptionsMaker) -> None:
    records = [*make_records(30), {"_id": "long", "text": "字" * 500}, {"_id": "bad"}]
    settings = options(records, max_reject_rate=0.1)
    estimate = estimated(settings)
    manifest, encoded = build(settings, COUNT, BigramEncoder("query"))
    assert estimate.is_whole
    assert (estimate.documents, estimate.tokens) == (31, encoded.summary.tokens)
    assert (estimate.rejected, estimate.truncated) == (1, 1 / 31)
    assert estimate.factory == manifest.factory
    size = sum(path.stat().st_size for path in encoded.folder.glob("shard-*.npy"))
    assert estimate.shards == size - 128 * len(list(encoded.folder.glob("shard-*.npy")))
    assert estimate.vectors_file == pytest.approx(manifest.files["vectors.faiss"].bytes, rel=0.02)
    assert (
        "31 documents, estimated from the whole corpus; 1 of" in format_estimate(estimate, RATE)[0]
    )


RATE = EncodingRate(1000, "GPU", "as given")


def test_a_compressed_corpus_is_estimated_as_the_plain_one(options: OptionsMaker) -> None:
    for count in (500, 30_000):
        settings = options(uneven_records(count))
        plain = Path(settings.corpus)
        packed = plain.with_name("packed.jsonl.gz")
        packed.write_bytes(gzip.compress(plain.read_bytes(), 1))
        assert estimated(replace(settings, corpus=str(packed))) == estimated(settings)


@pytest.mark.e2e
def test_a_large_corpus_is_sampled(options: OptionsMaker, tmp_path: Path) -> None:
    records = uneven_records(20_000)
    estimate = estimated(options(records))
    tokens = sum(min(len(r["text"]), MAX_LENGTH) for r in records)
    assert not estimate.is_whole
    assert estimate.sampled < 0.9 * len(records)
    assert estimate.documents == pytest.approx(len(records), rel=0.05)
    assert estimate.tokens == pytest.approx(tokens, rel=0.05)
    cut = sum(len(r["text"]) > MAX_LENGTH for r in records) / len(records)
    assert estimate.truncated == pytest.approx(cut, rel=0.1)
    # The same records in many files.
    folder = tmp_path / "parts"
    folder.mkdir()
    for part in range(40):
        write_jsonl(folder / f"{part:02d}.jsonl", records[500 * part : 500 * (part + 1)])
    parts = estimated(build_options(tmp_path, folder))
    assert parts.tokens == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize("group", [500, 5000, 20_000])
def test_rows_of_parquet_are_exact_and_their_tokens_estimated(tmp_path: Path, group: int) -> None:
    records = uneven_records(20_000)
    table = pa.table({"_id": [r["_id"] for r in records], "text": [r["text"] for r in records]})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=group)
    estimate = estimated(build_options(tmp_path, tmp_path / "c.parquet"))
    assert estimate.documents == 20_000
    tokens = sum(min(len(r["text"]), MAX_LENGTH) for r in records)
    assert estimate.tokens == pytest.approx(tokens, rel=0.07)
    assert not estimate.is_whole


def test_every_line_belongs_to_one_block(tmp_path: Path) -> None:
    # One line is longer than a block of 64 KiB, others end at the end of a block.
    lengths = [10, 70_000, *([300] * 500), 65_000, 200]
    records = [{"_id": i, "text": "x" * length} for i, length in enumerate(lengths)]
    files = [write_jsonl(tmp_path / f"{i}.jsonl", records[i::3]) for i in range(3)]
    (sample,) = sample_corpus(files, 100_000)
    assert sample.read == sample.units > 3 * 64 * 1024
    ids = sorted(int(record.id) for record in sample.records if isinstance(record, Document))
    assert ids == list(range(len(lengths)))
    assert len(sample.records) == len(ids)


def test_chunks_are_estimated(options: OptionsMaker) -> None:
    records = [{"_id": f"d{i}", "text": f"第{i}篇说明。" * 2 * i} for i in range(1, 11)]
    chunking = Chunking(tokens=30, overlap=8)
    settings = options(records, chunking=chunking)
    estimate = estimated(settings, Chunker(COUNT, chunking))
    _, encoded = build(settings, COUNT, BigramEncoder("query"))
    assert estimate.documents == 10
    assert estimate.rows == encoded.staged.chunks
    # Equal chunks are encoded once.
    assert estimate.tokens >= encoded.summary.tokens
    assert f"10 documents in {encoded.staged.chunks} chunks" in format_estimate(estimate, RATE)[0]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "factory",
    [
        *("Flat", "HNSW16", "HNSW32,SQ8", "HNSW32,SQfp16", "IVF32,Flat", "IVF32,SQ8"),
        *(
            "PCA16,HNSW8,SQ8,Refine(SQ8)",
            "IVF32,PQ16x8,RFlat",
            "IVF32,PQ32x4fs,Refine(SQfp16)",
            "IVF32,PQ16x8,Refine(SQ8)",
        ),
    ],
)
def test_the_size_of_an_index_file_is_estimated_from_its_factory(factory: str) -> None:
    count, dimension = 2000, 64
    vectors = np.random.default_rng(0).normal(size=(count, dimension)).astype(np.float32)
    index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    faiss.omp_set_num_threads(1)
    if "PQ16x8" in factory:
        # As in a build; it takes most of the time.
        faiss.downcast_index(index.base_index).do_polysemous_training = False
    if reduced_graph(index):
        train_reduced(index, vectors)
    else:
        index.train(vectors)
    index.add(vectors)
    size = faiss.serialize_index(index).nbytes
    assert index_bytes(factory, count, dimension) == pytest.approx(size, rel=0.03)


@pytest.mark.e2e
def test_the_size_of_stored_documents_is_estimated(options: OptionsMaker) -> None:
    settings = options(make_records(3000))
    _, encoded = build(settings, COUNT, BigramEncoder("query"))
    size = (encoded.folder / "documents.arrow").stat().st_size
    assert estimated(settings).documents_file == pytest.approx(size, rel=0.05)


def test_hours_are_computed_from_the_rate(options: OptionsMaker) -> None:
    estimate = estimated(options(make_records(30)))
    hours = estimate.tokens / 10 / 3600
    line = format_estimate(estimate, EncodingRate(10, "GPU", "as given"))[2]
    assert line == f"time    {hours:.3g} GPU hours at 10 tokens/s per GPU, as given"


def test_the_rate_is_measured_with_texts_of_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0, 108.0, 110.0])
    monkeypatch.setattr("indexer.estimate.time.perf_counter", lambda: next(ticks))
    encoder = BigramEncoder("document")
    texts = ["字" * (i % 100 + 1) for i in range(1000)]
    rate = measure_rate(encoder, texts, 4, 2, "test (auto)")
    assert encoder.texts_seen == 4 + 32
    assert rate.source == "measured here: 32 texts in 10.0 s with test (auto)"
    assert 2 * rate.tokens * 10 == pytest.approx(32 * 50.5, rel=0.15)


def test_a_version_in_milvus_is_not_counted_as_files(options: OptionsMaker) -> None:
    estimate = estimated(options(make_records(30), store="milvus"))
    lines = format_estimate(estimate, EncodingRate(1000, "GPU", "as given"))
    assert any("version in Milvus: vectors" in line and "(Flat)" in line for line in lines)
    assert not any("vectors.faiss" in line for line in lines)
    with raises(CareError, "unsupported_factory"):
        estimated(options(make_records(30), store="milvus", factory="IVF1024,SQ8"))


def test_corpora_that_cannot_be_estimated_are_an_error(
    options: OptionsMaker, tmp_path: Path
) -> None:
    with raises(CorpusError, "empty_corpus"):
        estimated(options([{"_id": "bad"}]))
    with raises(CareError, "too_few_vectors", needed=39936):
        estimated(options(make_records(30), factory="IVF1024,SQ8"))
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with raises(CorpusError, "unreadable"):
        estimated(build_options(tmp_path, tmp_path / "c.parquet"))


@pytest.mark.usefixtures("test_encoders")
def test_a_dry_run_writes_nothing_and_loads_no_encoder_if_the_rate_is_given(
    tmp_path: Path,
    pair_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(50))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    command = ["index", str(corpus), "--dry-run", "--index", "test"]
    command += ["--pair", str(pair_file)]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "measured here: 50 texts in" in output
    assert [line[:7].strip() for line in output.splitlines()] == [
        *("corpus", "tokens", "time", "disk", "", "memory", ""),
    ]

    def refuse(*_: object) -> None:
        raise AssertionError("the encoder is loaded")

    monkeypatch.setattr("care.indexing.document_encoder", refuse)
    assert main([*command, "--tokens-per-second", "500"]) == 0
    tokens = sum(len(f"{r['title']}\n{r['text']}") for r in make_records(50))
    assert f"tokens  {tokens:,}: " in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    corpus.write_text(json.dumps({"_id": "bad"}), encoding="utf-8")
    assert main([*command, "--tokens-per-second", "500"]) == 1
    assert error_code(capsys.readouterr().err) == "empty_corpus"
