"""The benchmark of builds: null encoder, corpus and phases."""

import json
from pathlib import Path

import numpy as np
import pytest

from indexer.build import build
from indexer.corpus import read_corpus
from indexer.encoding import PipelinedEncoder
from loadtest.bench import results
from loadtest.bench.build import NullEncoder, run, write_corpus
from loadtest.bench.options import BuildBenchOptions
from tests.indexer.builds import build_options


def test_the_null_encoder_gives_different_texts_different_vectors() -> None:
    encoder = NullEncoder()
    assert isinstance(encoder, PipelinedEncoder)
    vectors = encoder.encode(["一", "二", "一"]).vectors
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert vectors[0] @ vectors[1] < 0.99


def test_the_corpus_is_deterministic_and_can_be_indexed(tmp_path: Path) -> None:
    corpus, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_corpus(corpus, 300)
    write_corpus(again, 300)
    assert corpus.read_bytes() == again.read_bytes()
    assert len(list(read_corpus([corpus]))) == 300
    manifest, encoded = build(build_options(tmp_path, corpus), NullEncoder(), NullEncoder())
    assert (manifest.count, encoded.staged.rejected) == (300, 0)
    assert encoded.summary.new_texts == 300


@pytest.mark.e2e
def test_a_build_is_measured_phase_by_phase(tmp_path: Path) -> None:
    options = BuildBenchOptions(
        documents=[400], real_documents=0, cache=tmp_path / "cache", out=tmp_path
    )
    run(options)
    (size,) = json.loads((tmp_path / results.BUILD_NAME).read_text())["sizes"]
    assert size["documents"] == 400
    assert list(size["phases"]) == ["stage", "encode", "index"]
    assert size["phases"]["index"]["factory"] == "Flat"
    assert all(phase["peak_own_bytes"] > 2**20 for phase in size["phases"].values())
    assert not list((tmp_path / "cache").iterdir())
