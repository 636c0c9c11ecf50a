"""The query side of a pair, a checkpoint, as graphs of several precisions."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from tokenizers import Tokenizer

from core.errors import CareError, PairError, ProviderError
from core.files import sha256_file
from core.text import with_prompt
from core.types import EncoderSpec, Pair
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ProviderOptions
from models.encoders.transformers import TransformersEncoder
from models.export.gates import BOUNDS, TENSORRT_ENGINE, Precision, check
from models.export.measurement import Reference, measure
from models.export.onnx import export_encoder, half_precision, save
from models.export.quantization import (
    measure_activations,
    quantize_blocks,
    quantize_int8,
    quantize_tables,
)
from models.export.report import Row

TOKENIZER, ENGINES = "tokenizer.json", "tensorrt"


@dataclass(frozen=True, slots=True)
class QuerySide:
    """The query side that is exported.

    Attributes:
        spec: Its facts.
        encoder: The checkpoint in float32, on the processor.
    """

    spec: EncoderSpec
    encoder: TransformersEncoder

    @classmethod
    def of(cls, pair: Pair) -> "QuerySide":
        """Loads the query side of a pair.

        Raises:
            PairError: If it is no checkpoint, or does not load.
        """
        if pair.query.format == "onnx":
            raise PairError(f"the query side of '{pair.name}' is in ONNX already")
        encoder = TransformersEncoder(pair.query, pair.folder, device="cpu", dtype="float32")
        # The attention that the exporter of graphs can write, and that optimizers know.
        encoder.parts()[0].set_attn_implementation("eager")
        return cls(pair.query, encoder)

    def graph(self, *, fuse: bool = True) -> onnx.ModelProto:
        """Returns the graph in float32."""
        model, dense, _ = self.encoder.parts()
        return export_encoder(model, self.spec.pooling, dense, self.spec.dimension, fuse=fuse)

    def exported(self, weights: Path) -> EncoderSpec:
        """Returns the facts of written weights, beside which the tokenizer lies."""
        files = {"weights": weights, "tokenizer": weights.with_name(TOKENIZER)}
        return EncoderSpec.model_validate(
            self.spec.model_dump(exclude={"adapter", "config"})
            | {"format": "onnx"}
            | {name: str(path) for name, path in files.items()}
            | {f"{name}_sha256": sha256_file(path) for name, path in files.items()}
        )


@dataclass(frozen=True, slots=True)
class Exporter:
    """Writes graphs and holds them to their gates.

    Attributes:
        side: What is exported.
        folder: Where files are written.
        reference: What graphs are compared with.
        calibration: Typical queries.
        provider: What the service will encode on.
        threads: Threads of the processor.
    """

    side: QuerySide
    folder: Path
    reference: Reference
    calibration: Sequence[str]
    provider: ProviderOptions
    threads: int

    def export(self, precision: Precision) -> tuple[Row, EncoderSpec | None]:
        """Writes one precision; what fails leaves no file.

        Float32 comes first: `fp16` and `int8` are made from its file.

        Returns:
            The row of the report, and the facts of the graph if it passed.

        Raises:
            OSError: If the disk fails.
        """
        weights = self.folder / f"query-{precision}.onnx"
        row = Row(precision, self.provider.name, weights.name, "", 0.0, None, ())
        try:
            save(self._make(precision), weights)
            spec = self.side.exported(weights)
            row = replace(row, weights_sha256=spec.weights_sha256, megabytes=_megabytes(weights))
            graph, row = self._load(spec, row)
            measured = measure(graph, weights, self.reference, self.provider)
            bounds = TENSORRT_ENGINE if row.provider == "tensorrt" else BOUNDS[precision]
            row = replace(row, measured=measured, gates=check(measured, bounds))
        except OSError:
            raise
        except Exception as error:  # the libraries raise nothing narrower
            row = replace(row, reason=_first_line(error))
        if not row.failures:
            return row, spec
        if precision == "tensorrt":
            shutil.rmtree(self.folder / ENGINES, ignore_errors=True)
        weights.unlink(missing_ok=True)
        weights.with_name(f"{weights.name}.data").unlink(missing_ok=True)
        return row, None

    def _make(self, precision: Precision) -> onnx.ModelProto:
        if precision in ("fp32", "tensorrt"):
            return self.side.graph(fuse=precision == "fp32")
        graph = onnx.load(self.folder / "query-fp32.onnx")
        # They describe a file beside it, which other weights may not need.
        del graph.metadata_props[:]
        return half_precision(graph) if precision == "fp16" else self._integers(graph)

    def _integers(self, graph: onnx.ModelProto) -> onnx.ModelProto:
        tokenizer = Tokenizer.from_file(str(self.folder / TOKENIZER))
        tokenizer.enable_truncation(self.side.spec.max_length)
        tokenizer.encode_special_tokens = True
        prompted = [with_prompt(self.side.spec.prompt, text) for text in self.calibration]
        encoded = tokenizer.encode_batch(prompted)
        ids = (np.array(text.ids, dtype=np.int64) for text in encoded)
        integer = quantize_int8(graph, measure_activations(graph, ids))
        return quantize_tables(quantize_blocks(integer, accuracy_level=4, bits=8), bits=8)

    def _load(self, spec: EncoderSpec, row: Row) -> tuple[OnnxEncoder, Row]:
        if row.precision == "tensorrt":
            engines = ProviderOptions("tensorrt", cache=self.folder / ENGINES)
            try:
                # Loading builds the engine; the gates then encode with it.
                encoder = OnnxEncoder(spec, self.folder, self.threads, engines)
                return encoder, replace(row, provider="tensorrt")
            except ProviderError as error:
                row = replace(row, reason=f"no engine was built: {error}")
        return OnnxEncoder(spec, self.folder, self.threads, self.provider), row


def _megabytes(weights: Path) -> float:
    files = (weights, weights.with_name(f"{weights.name}.data"))
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, CareError) else f"{type(error).__name__}: {text}"
