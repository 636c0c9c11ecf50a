"""Both encoders of a pair, for notebooks and scripts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from care.options import setting, several
from core import encoders
from core.choices import DEFAULT_PAIR, Backend, Dtype
from core.encoders import Encoder
from core.errors import DataError
from core.text import document_text, normalize_text
from core.types import FloatArray
from models import pairs
from models.encoders.factory import EncoderOptions, document_encoder, query_encoder


class Pair:
    """A query encoder and a document encoder that share one embedding space.

    Made by `load_pair`. Each encoder is loaded when it is used first.
    """

    def __init__(self, pair: encoders.Pair, options: EncoderOptions) -> None:
        self._pair = pair
        self._options = options

    @property
    def name(self) -> str:
        """Name of the pair."""
        return self._pair.name

    @property
    def dimension(self) -> int:
        """Number of dimensions of the vectors."""
        return self._pair.document.dimension

    @property
    def embedding_space(self) -> str:
        """Name of the embedding space that both encoders share."""
        return self._pair.embedding_space

    def encode_queries(self, queries: Sequence[str], *, batch_size: int = 32) -> FloatArray:
        """Encodes questions.

        Args:
            queries: n texts; a text longer than the encoder reads is truncated.
            batch_size: Texts in a batch.

        Returns:
            float32 [n, dimension], each row of unit L2 norm: the cosine similarities of queries
            and documents are `queries @ documents.T`.

        Raises:
            DataError: If a text is empty.
            PairError: If the files of the encoder are missing or wrong.
            ProviderError: If a library that the encoder needs is not installed.
        """
        texts = [normalize_text(query) for query in several(queries, "queries")]
        return self._encode(self._queries, texts, batch_size)

    def encode_documents(
        self, documents: Iterable[Mapping[str, Any] | str], *, batch_size: int = 32
    ) -> FloatArray:
        """Encodes documents as the indexer does: title and text together.

        Args:
            documents: n texts, or mappings with `text` and optionally `title`; other fields are
                ignored.
            batch_size: Texts in a batch.

        Returns:
            float32 [n, dimension], each row of unit L2 norm.

        Raises:
            DataError: If a document has no text.
            EmbeddingServerError: If the backend is a server that fails.
            PairError: If the files of the encoder are missing or wrong.
            ProviderError: If a library that the encoder needs is not installed.
        """
        texts = list(_document_texts(documents))
        return self._encode(self._documents, texts, batch_size)

    def __repr__(self) -> str:
        return f"Pair('{self.name}', dimension={self.dimension})"

    @cached_property
    def _queries(self) -> Encoder:
        return query_encoder(self._pair, self._options)

    @cached_property
    def _documents(self) -> Encoder:
        return document_encoder(self._pair, self._options)

    def _encode(self, encoder: Encoder, texts: Sequence[str], batch_size: int) -> FloatArray:
        for position, text in enumerate(texts):
            if not text:
                message = f"text {position} is empty"
                raise DataError(message, code="empty_text", position=position)
        vectors = [np.empty((0, self.dimension), np.float32)]
        for start in range(0, len(texts), batch_size):
            vectors.append(encoder.encode(texts[start : start + batch_size]).vectors)
        return np.concatenate(vectors)


def load_pair(
    name: str | None = None,
    *,
    backend: Backend = "auto",
    dtype: Dtype = "auto",
    threads: int | None = None,
    base_url: str | None = None,
    model: str | None = None,
) -> Pair:
    """Loads a pair of encoders.

    Example:
        >>> pair = care.load_pair("care-mini")
        >>> queries = pair.encode_queries(["高血压能喝咖啡吗？"])
        >>> documents = pair.encode_documents([{"title": "高血压", "text": "少喝咖啡。"}])
        >>> queries @ documents.T

    Args:
        name: Trained or registered pair, or path of a pair's TOML file; by default `CARE_PAIR` or
            "care-mini".
        backend: What runs the document encoder: "onnx", "openvino", "transformers", "vllm" or
            "openai"; "auto" chooses by the format of its weights.
        dtype: Data type that a checkpoint or OpenVINO computes in; "auto" is bfloat16 on a GPU, for
            OpenVINO the fastest one of the processor, else float32.
        threads: Threads of ONNX Runtime or OpenVINO, or None for all available processors.
        base_url: Address of the server, with backend "openai".
        model: The server's name of the model, or None for that of the pair.

    Raises:
        PairError: If the pair is unknown or its file is wrong.
    """
    chosen = pairs.load_pair(name or setting("CARE_PAIR", str, DEFAULT_PAIR))
    options = EncoderOptions(
        backend=backend, dtype=dtype, threads=threads or 0, base_url=base_url, model=model
    )
    return Pair(chosen, options)


def _document_texts(documents: Iterable[Mapping[str, Any] | str]) -> Iterator[str]:
    for position, document in enumerate(several(documents, "documents")):
        if isinstance(document, str):
            yield document_text("", document)
            continue
        title, text = document.get("title") or "", document.get("text")
        if not isinstance(title, str) or not isinstance(text, str) or not normalize_text(text):
            message = f"document {position} has no text, or its title or text is not a string"
            raise DataError(message, code="bad_document", position=position)
        yield document_text(title, text)
