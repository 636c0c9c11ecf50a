from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from core.encoders import TokenVectorSpec
from core.errors import IndexVersionError
from core.manifest import TOKENS, IndexManifest
from models.late_interaction import CODECS, Codec, decode_tokens, encode_tokens, max_sim, normalized
from stores.token_vectors import TokenVectors, open_token_vectors, write_token_vectors
from tests.errors import raises

LENGTHS = (3, 1, 40, 7)


def documents(dimension: int = 32) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    rng = np.random.default_rng(0)
    found = (rng.standard_normal((count, dimension)).astype(np.float32) for count in LENGTHS)
    return [normalized(vectors) for vectors in found]


def write(folder: Path, codec: Codec = "2bit", count: int = len(LENGTHS)) -> IndexManifest:
    spec = TokenVectorSpec(space="s", dimension=32, pooling=1, codec=codec)
    rows = [encode_tokens(vectors, codec) for vectors in documents()]
    component = write_token_vectors(folder, rows, spec)
    return cast(IndexManifest, SimpleNamespace(components={TOKENS: component}, count=count))


def opened(folder: Path, manifest: IndexManifest) -> TokenVectors:
    found = open_token_vectors(folder, manifest.components[TOKENS], manifest.count)
    assert found
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_scores_are_those_of_the_stored_vectors(tmp_path: Path, codec: Codec) -> None:
    tokens = opened(tmp_path, write(tmp_path, codec))
    query = documents()[3]
    stored = [decode_tokens(encode_tokens(vectors, codec), codec) for vectors in documents()]
    rows = np.array([2, 0, 3])
    expected = max_sim(query, [stored[row] for row in rows])
    np.testing.assert_allclose(tokens.scores(query, rows), expected, atol=1e-6)
    assert tokens.scores(query, rows).argmax() == 2
    assert tokens.scores(query, np.empty(0, np.int64)).shape == (0,)
    np.testing.assert_array_equal(tokens.row(1), encode_tokens(documents()[1], codec))


def test_a_version_without_token_vectors_has_none(tmp_path: Path) -> None:
    assert open_token_vectors(tmp_path, None, 4) is None


def test_the_files_are_in_the_manifest(tmp_path: Path) -> None:
    component = write(tmp_path).components[TOKENS]
    sizes = {name: record.bytes for name, record in component.files.items()}
    assert sizes == {"tokens/vectors.values": sum(LENGTHS) * 8, "tokens/vectors.offsets": 5 * 8}
    assert component.settings["codec"] == "2bit"


def test_rows_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    manifest = write(tmp_path, count=5)
    with raises(IndexVersionError, "unreadable_token_vectors"):
        opened(tmp_path, manifest)


@pytest.mark.parametrize("name", ["vectors.values", "vectors.offsets"])
def test_files_that_are_cut_or_missing_are_an_error(tmp_path: Path, name: str) -> None:
    manifest = write(tmp_path)
    path = tmp_path / TOKENS / name
    path.write_bytes(path.read_bytes()[:-8])
    with raises(IndexVersionError, "unreadable_token_vectors"):
        opened(tmp_path, manifest)
    path.unlink()
    with raises(IndexVersionError, "unreadable_token_vectors"):
        opened(tmp_path, manifest)


def test_another_format_is_an_error(tmp_path: Path) -> None:
    manifest = write(tmp_path)
    manifest.components[TOKENS] = manifest.components[TOKENS].model_copy(update={"format": 2})
    with raises(IndexVersionError, "unreadable_token_vectors"):
        opened(tmp_path, manifest)
