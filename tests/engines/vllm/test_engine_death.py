"""A vLLM engine that is killed during a build."""

import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from core.encoders import Encoding
from core.errors import ProviderError
from indexer.build import build
from models.encoders.tokenizer import Tokens
from models.encoders.transformers import TransformersEncoder
from models.encoders.vllm import VllmEncoder
from tests.checkpoints import TEXTS, checkpoint_spec
from tests.conftest import make_records, write_jsonl
from tests.errors import raises
from tests.indexer.builds import build_options

COUNT = 40


class Disturbed(VllmEncoder):
    """Its engine receives SIGKILL once, during the third batch."""

    batches = 0

    def encode_tokens(self, tokens: Sequence[Tokens]) -> Encoding:
        self.batches += 1
        if self.batches == 3:
            kill_engine()
        return super().encode_tokens(tokens)


def kill_engine() -> None:
    (engine,) = multiprocessing.active_children()
    os.kill(engine.pid or 0, signal.SIGKILL)


def test_a_build_with_a_killed_engine_equals_an_uninterrupted_one(
    qwen3: Path, tmp_path: Path
) -> None:
    spec = checkpoint_spec(qwen3)
    query = TransformersEncoder(checkpoint_spec(qwen3, role="query"), Path(), device="cpu")
    manifests, vectors = [], []
    for kind in (VllmEncoder, Disturbed):
        folder = tmp_path / kind.__name__
        folder.mkdir()
        corpus = write_jsonl(folder / "corpus.jsonl", make_records(COUNT))
        encoder = kind(spec, Path())
        try:
            manifest, encoded = build(build_options(folder, corpus), encoder, query)
        finally:
            encoder.close()
        assert encoded.reasons == {}
        manifests.append(manifest)
        shards = sorted(encoded.folder.glob("shard-*.npy"))
        vectors.append(np.concatenate([np.load(shard) for shard in shards]))
    assert encoder.batches > COUNT // 4  # type: ignore[attr-defined]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)
    undisturbed, disturbed = manifests
    assert disturbed.corpus == undisturbed.corpus
    documents = "documents.arrow"
    assert disturbed.files[documents] == undisturbed.files[documents]


def test_a_stopped_engine_is_restarted_by_the_next_call(qwen3: Path) -> None:
    encoder = VllmEncoder(checkpoint_spec(qwen3), Path())
    try:
        expected = encoder.encode(TEXTS).vectors
        kill_engine()
        with raises(ProviderError, "engine_died"):
            encoder.encode(TEXTS)
        np.testing.assert_allclose(encoder.encode(TEXTS).vectors, expected, atol=1e-5)
        # vLLM rejects an empty prompt; the process keeps running but is replaced.
        (before,) = multiprocessing.active_children()
        with raises(ProviderError, "engine_failed"):
            encoder.encode_tokens([Tokens([], truncated=False)])
        np.testing.assert_allclose(encoder.encode(TEXTS).vectors, expected, atol=1e-5)
        (after,) = multiprocessing.active_children()
        assert after.pid != before.pid
    finally:
        encoder.close()
    assert multiprocessing.active_children() == []
