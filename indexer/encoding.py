"""Second pass of a build: texts to vectors, shard by shard, resumable."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.documents import DocumentReader
from core.errors import TextRefusedError, VectorError
from core.text import document_text
from core.types import Encoder, FloatArray
from indexer.progress import progress_bar
from indexer.shards import whole_shards, write_shard
from indexer.staging import unique_text_rows

# For n texts: bool [n], which of them are known; and float32 [known, dimension], their vectors.
Reuse = Callable[[Sequence[str]], tuple[NDArray[np.bool_], FloatArray]]


@dataclass(frozen=True, slots=True)
class EncodingSummary:
    """What the second pass did; all but new texts and seconds counts resumed shards too."""

    texts: int
    new_texts: int
    resumed_texts: int
    reused_texts: int
    tokens: int
    truncated: int
    seconds: float
    encoder_seconds: float


def encode_corpus(
    folder: Path,
    encoder: Encoder,
    *,
    shard_size: int,
    batch_size: int,
    progress: bool,
    reuse: Reuse | None = None,
) -> EncodingSummary:
    """Encodes the unique texts of a staged corpus into shards, from the first missing one.

    Inside a shard texts are sorted by length, so that batches hold little padding. Batches
    depend on the shard alone: a resumed run computes what an unbroken one would have.
    Texts that `reuse` knows are not encoded.

    Raises:
        VectorError: If the encoder refuses a text, or returns vectors that are not finite and
            of unit norm.
    """
    started = time.perf_counter()
    reader = DocumentReader(folder / documents.FILE_NAME)
    rows = unique_text_rows(folder)
    records = whole_shards(folder)
    resumed = sum(record.rows for record in records)
    encoder_seconds = 0.0
    new_texts = new_tokens = 0
    with progress_bar("encode", show=progress, total=len(rows), initial=resumed) as bar:
        for start in range(resumed, len(rows), shard_size):
            batch_rows = [int(row) for row in rows[start : start + shard_size]]
            shard_documents = [reader[row] for row in batch_rows]
            texts = [document_text(d.title, d.text) for d in shard_documents]
            vectors = np.empty((len(texts), encoder.spec.dimension), dtype=np.float32)
            tokens = truncated = 0
            known = np.zeros(len(texts), dtype=np.bool_)
            if reuse:
                known, found = reuse(texts)
                vectors[known] = found
                bar.update(int(known.sum()))
            order = [int(i) for i in np.flatnonzero(~known)]
            order.sort(key=lambda i: len(texts[i]), reverse=True)
            for at in range(0, len(order), batch_size):
                batch = order[at : at + batch_size]
                before = time.perf_counter()
                try:
                    encoding = encoder.encode([texts[i] for i in batch])
                except TextRefusedError as error:
                    id_ = shard_documents[batch[error.position]].id
                    raise VectorError(f"document '{id_}': {error}") from error
                encoder_seconds += time.perf_counter() - before
                _check(encoding.vectors, vectors.shape[1], [shard_documents[i].id for i in batch])
                vectors[batch] = encoding.vectors
                tokens += int(encoding.token_counts.sum())
                truncated += int(encoding.truncated.sum())
                bar.update(len(batch))
                elapsed = time.perf_counter() - started
                bar.set_postfix_str(
                    f"{(new_tokens + tokens) / elapsed:,.0f} tokens/s", refresh=False
                )
            new_texts += len(order)
            new_tokens += tokens
            records.append(
                write_shard(
                    folder,
                    start // shard_size,
                    vectors,
                    [d.id for d in shard_documents],
                    tokens=tokens,
                    truncated=truncated,
                    reused=len(texts) - len(order),
                )
            )
    return EncodingSummary(
        texts=len(rows),
        new_texts=new_texts,
        resumed_texts=resumed,
        reused_texts=sum(record.reused for record in records),
        tokens=sum(record.tokens for record in records),
        truncated=sum(record.truncated for record in records),
        seconds=time.perf_counter() - started,
        encoder_seconds=encoder_seconds,
    )


def _check(vectors: FloatArray, dimension: int, ids: list[str]) -> None:
    if vectors.shape != (len(ids), dimension):
        raise VectorError(
            f"the encoder returned an array of shape {vectors.shape} for {len(ids)} documents "
            f"from '{ids[0]}' on, instead of {dimension} dimensions each"
        )
    norms = np.linalg.norm(vectors, axis=1)
    bad = ~(np.abs(norms - 1) < 1e-3)
    if bad.any():
        raise VectorError(
            f"the encoder returned a vector of norm {norms[bad.argmax()]} "
            f"for document '{ids[int(bad.argmax())]}'"
        )
