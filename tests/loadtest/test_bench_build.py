"""The benchmark of builds: its encoder, its corpus, its table."""

import json
from pathlib import Path

import numpy as np

from indexer.build import build
from indexer.corpus import read_corpus
from indexer.encoding import PipelinedEncoder
from loadtest.bench import report
from loadtest.bench.build import NullEncoder, write_corpus
from tests.indexer.builds import build_options


def test_the_null_encoder_tells_texts_apart_and_needs_no_weights() -> None:
    encoder = NullEncoder()
    assert isinstance(encoder, PipelinedEncoder)
    vectors = encoder.encode(["一", "二", "一"]).vectors
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    np.testing.assert_array_equal(vectors[0], vectors[2])
    assert vectors[0] @ vectors[1] < 0.99


def test_its_corpus_is_built_and_is_the_same_each_time(tmp_path: Path) -> None:
    corpus, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    write_corpus(corpus, 300)
    write_corpus(again, 300)
    assert corpus.read_bytes() == again.read_bytes()
    assert len(list(read_corpus([corpus]))) == 300
    manifest, encoded = build(build_options(tmp_path, corpus), NullEncoder(), NullEncoder())
    assert (manifest.count, encoded.staged.rejected) == (300, 0)
    assert encoded.summary.new_texts == 300


def test_the_table_names_each_phase_and_the_share_of_the_real_encoder(tmp_path: Path) -> None:
    phase = {"seconds": 61.2, "processor_seconds": 40.4, "peak_own_bytes": 200 << 20}
    phase["peak_resident_bytes"] = 300 << 20
    index = phase | {"factory": "IVF1024,SQ8", "vectors_bytes": 5 << 20}
    environment = {
        "date": "2026-01-01",
        "commit": None,
        "hardware": {
            "processor": "x",
            "processors": 2,
            "memory_bytes": 2**33,
            "load_average": [1.0, 1.0, 1.0],
        },
        "versions": {"python": "3.11"},
        "other_environments": {},
    }
    result = {
        "environment": environment,
        "options": {"dimension": 384, "threads": 1, "shard_size": 4096, "memory_gib": 0.25},
        "sizes": [{"documents": 1_000_000, "phases": {"stage": phase, "index": index}}],
        "encoder": {
            "pair": "care-mini",
            "texts": 299,
            "shards": 4,
            "seconds": 60.0,
            "encoder_share": 0.993,
        },
    }
    table = report.write(json.loads(json.dumps(result)), tmp_path / report.BUILD_NAME).read_text()
    assert "| 1,000,000 | stage | 61 | 40 | 200 | 300 |  |" in table
    assert "| 1,000,000 | index | 61 | 40 | 200 | 300 | IVF1024,SQ8: 5 MiB |" in table
    assert "299 texts in 4 shards: 60.0 s, in 99.3% of which the encoder works" in table
