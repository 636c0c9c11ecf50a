"""The query side of a pair, a checkpoint, as graphs of several precisions."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from core.encoders import EncoderSpec, Pair
from core.errors import CareError, PairError, ProviderError
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ProviderOptions
from models.encoders.tokenizer import file_tokenizer
from models.encoders.transformers import TransformersEncoder
from training.export.measurement import Reference
from training.export.onnx import describe, export_encoder, half_precision, save
from training.export.quantization import quantize_int8
from training.export.report import Precision, Row

ENGINES = "tensorrt"


def load_query_side(pair: Pair) -> TransformersEncoder:
    """Loads the query side in float32, with attention that exporter and optimizers know."""
    if pair.query.format == "onnx":
        message = f"the query side of '{pair.name}' is in ONNX already"
        raise PairError(message, code="not_a_checkpoint", pair=pair.name)
    encoder = TransformersEncoder(pair.query, pair.folder, device="cpu", dtype="float32")
    encoder.parts()[0].set_attn_implementation("eager")
    return encoder


@dataclass(frozen=True, slots=True)
class Exporter:
    """Writes graphs of an encoder, as `load_query_side` returns it, and compares them.

    They are written to `folder`, where the tokenizer lies, and measured on what the service will
    encode on; `calibration` are typical queries.
    """

    encoder: TransformersEncoder
    folder: Path
    reference: Reference
    calibration: Sequence[str]
    provider: ProviderOptions
    threads: int

    def export(self, precision: Precision) -> tuple[Row, EncoderSpec | None]:
        """Writes one precision, and returns its row of the report and, if it passed, its facts.

        What fails leaves no file. Float32 comes first: `fp16` and `int8` are made from its file.
        """
        weights = self.folder / f"query-{precision}.onnx"
        row = Row(precision, self.provider.name, weights.name)
        try:
            save(self._make(precision), weights)
            spec = self._described(weights)
            row = replace(row, weights_sha256=spec.weights_sha256, megabytes=_megabytes(weights))
            graph, row = self._load(spec, row)
            row = replace(row, values=self.reference.measure(graph))
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
        spec = self.encoder.spec
        if precision in ("fp32", "tensorrt"):
            model, dense, _ = self.encoder.parts()
            fuse = precision == "fp32"
            return export_encoder(model, spec.pooling, dense, spec.dimension, fuse=fuse)
        fp32 = self.folder / "query-fp32.onnx"
        graph = onnx.load(fp32)
        # They describe a file beside it, which other weights may not need.
        del graph.metadata_props[:]
        if precision == "fp16":
            return half_precision(graph)
        tokenizer = file_tokenizer(self._described(fp32), self.folder)
        return quantize_int8(graph, (np.array(t.ids) for t in tokenizer(self.calibration)))

    def _described(self, weights: Path) -> EncoderSpec:
        return describe(self.encoder.spec.model_dump(exclude={"adapter", "config"}), weights)

    def _load(self, spec: EncoderSpec, row: Row) -> tuple[OnnxEncoder, Row]:
        if row.precision == "tensorrt":
            engines = ProviderOptions("tensorrt", cache=self.folder / ENGINES)
            try:
                # Loading builds the engine; it is what is measured then.
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
