"""The bare loop computes the same results as the service."""

import faiss
import numpy as np
import pytest

from core.encoders import Pair
from loadtest.bench import bare
from loadtest.bench.bare import Loop, LoopConfig, loop_configs
from loadtest.bench.options import ServiceOptions
from loadtest.traffic import SAMPLE, read_texts
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair

TEXTS = read_texts(SAMPLE)[:12]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair("care-mini")


@pytest.fixture(scope="module")
def encoder(pair: Pair) -> OnnxEncoder:
    return OnnxEncoder(pair.query, pair.folder, 1)


def test_the_loop_computes_the_vectors_of_the_encoder(pair: Pair, encoder: OnnxEncoder) -> None:
    index = faiss.IndexFlatIP(pair.query.dimension)
    index.add(encoder.encode(TEXTS).vectors)
    config = LoopConfig(batch=4, sessions=1, threads=1, spinning=False)
    loop = Loop(pair, index, 1, config)
    np.testing.assert_allclose(loop.encode(TEXTS), encoder.encode(TEXTS).vectors, atol=1e-5)
    assert loop.search(TEXTS[4:8])[:, 0].tolist() == [4, 5, 6, 7]


def test_configurations_are_distinct() -> None:
    assert len(set(loop_configs())) == len(loop_configs())


def test_an_index_is_searched_with_the_parameters_of_its_manifest(options: ServiceOptions) -> None:
    config = LoopConfig(batch=2, sessions=2, threads=1, spinning=False)
    assert bare.sustain(options, config, 0.01) > 0
    found = bare.latency(options, config, 0.01)
    assert found["requests"] % 3 == 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]
