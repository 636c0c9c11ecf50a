"""Encoders that ONNX Runtime runs; pooling and normalisation are in the graph."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
from tokenizers import Encoding as TokenEncoding
from tokenizers import Tokenizer

from core.errors import PairError
from core.files import sha256_file
from core.text import with_prompt
from core.types import EncoderSpec, Encoding
from core.vectors import truncate_normalize

OUTPUT = "sentence_embedding"


class OnnxEncoder:
    """One side of a pair, from an ONNX file and a `tokenizer.json`.

    Args:
        spec: The facts of the encoder.
        folder: The folder that the spec's paths are relative to.
        threads: Threads that one call may use.

    Raises:
        PairError: If a file is missing, is not the one that the spec describes, or does
            not load.
    """

    def __init__(self, spec: EncoderSpec, folder: Path, threads: int) -> None:
        weights, tokenizer = folder / spec.weights, folder / spec.tokenizer
        for path, checksum in (
            (weights, spec.weights_sha256),
            (tokenizer, spec.tokenizer_sha256),
        ):
            if not path.is_file():
                raise PairError(f"{path} is missing: it belongs to {spec.model}")
            if sha256_file(path) != checksum:
                raise PairError(
                    f"{path} is not the file that the pair describes: its sha256 differs"
                )
        self.spec = spec
        self._tokenizer = _load_tokenizer(tokenizer, spec.max_length)
        self._session = _load_session(weights, threads)

    def tokenize(self, texts: Sequence[str]) -> list[TokenEncoding]:
        """Tokenizes texts behind the encoder's prompt, cut to the encoder's length."""
        return self._tokenizer.encode_batch_fast(
            [with_prompt(self.spec.prompt, text) for text in texts]
        )

    def encode_tokens(self, tokens: Sequence[TokenEncoding]) -> Encoding:
        """Encodes tokenized texts as one batch, padded to the longest of them."""
        counts = np.array([len(t.ids) for t in tokens], dtype=np.int32)
        ids = np.zeros((len(tokens), counts.max(initial=1)), dtype=np.int64)
        mask = np.zeros_like(ids)
        for row, token in enumerate(tokens):
            ids[row, : counts[row]] = token.ids
            mask[row, : counts[row]] = 1
        (vectors,) = self._session.run([OUTPUT], {"input_ids": ids, "attention_mask": mask})
        return Encoding(
            vectors=truncate_normalize(vectors, self.spec.dimension),
            token_counts=counts,
            truncated=np.array([bool(t.overflowing) for t in tokens]),
        )

    def encode(self, texts: Sequence[str]) -> Encoding:
        """Encodes texts as one batch.

        Args:
            texts: At least one text, already under the text rules of `core.text`.

        Returns:
            float32 vectors [n, dimension] of unit norm, with token counts.
        """
        return self.encode_tokens(self.tokenize(texts))


def _load_tokenizer(path: Path, max_length: int) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise PairError(f"{path} is not a readable tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    # A user who types "</s>" means those letters.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _load_session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads take the processor from the search that runs beside the encoder.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no public base
        raise PairError(f"{path} is not a readable ONNX model: {error}") from error
    names = {i.name for i in session.get_inputs()} | {o.name for o in session.get_outputs()}
    missing = {"input_ids", "attention_mask", OUTPUT} - names
    if missing:
        raise PairError(f"{path} lacks the inputs or outputs {', '.join(sorted(missing))}")
    return session
