"""Texts that a build takes samples of: canaries of a version, and held-out queries for recall."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from core import documents
from core.canaries import canary_candidates, check_canaries, choose_canaries, make_canaries
from core.documents import DocumentReader
from core.encoders import Encoder
from core.errors import CorpusError
from core.manifest import Canary, IndexManifest
from core.shards import has_shards
from core.text import first_sentence, normalize_text
from core.types import FloatArray, RowArray
from indexer.corpus import corpus_files, read_corpus
from indexer.failures import ENCODING_ERRORS
from indexer.records import Reject
from indexer.staging import row_texts, unique_text_rows

_HELD_OUT_QUERIES = 200


def check_space(
    folder: Path, base: IndexManifest | None, encoder: Encoder, query_encoder: Encoder
) -> None:
    """Checks with up to 16 texts that both encoders share one embedding space.

    This takes seconds and precedes the encoding of the corpus. For an update, `base` is the version
    that it starts from.
    """
    if base:
        check_canaries(query_encoder, base.canaries)
        return
    if has_shards(folder):
        return
    reader = DocumentReader(folder / documents.FILE_NAME)
    rows = unique_text_rows(folder)

    def encoded(chosen: RowArray) -> FloatArray:
        texts = row_texts(reader, chosen)
        return np.concatenate([encoder.encode([text]).vectors for text in texts])

    with suppress(*ENCODING_ERRORS):  # the second pass isolates and reports the text
        check_canaries(query_encoder, sample_canaries(reader, rows, encoded))


def sample_canaries(
    reader: DocumentReader, text_rows: RowArray, vectors: Callable[[RowArray], FloatArray]
) -> list[Canary]:
    """Returns up to 16 canaries, spread over the rows of different texts.

    Args:
        text_rows: int64 [n], one row of each different text, ascending.
        vectors: Returns the document vectors of rows, float32 [rows, dimension].
    """
    rows = text_rows[canary_candidates(len(text_rows))]
    texts = list(row_texts(reader, rows))
    chosen = choose_canaries([len(text) for text in texts])
    return make_canaries([texts[i] for i in chosen], vectors(rows[chosen]))


def read_queries(path: Path) -> list[str]:
    """Reads held-out queries from JSONL; CorpusError if a record is invalid or there is none."""
    texts = []
    for location, record in read_corpus(corpus_files(str(path))):
        if isinstance(record, Reject):
            raise CorpusError(
                f"{location}: {record.reason}",
                code="bad_query",
                path=location.file,
                line=location.line,
            )
        texts.append(record.text)
    if not texts:
        raise CorpusError.at(path, "contains no queries", "no_queries")
    return texts


def first_sentences(reader: DocumentReader, rows: RowArray) -> list[str]:
    """Returns the first sentences of up to 200 documents, which serve as queries.

    `rows` are int64 [n], one row of each different text, ascending.
    """
    number = min(len(rows), _HELD_OUT_QUERIES)
    # Offset by half a step, so that these rows are not canaries.
    sample = [int(rows[(2 * i + 1) * len(rows) // (2 * number)]) for i in range(number)]
    return [first_sentence(normalize_text(reader[row].text)) for row in sample]
