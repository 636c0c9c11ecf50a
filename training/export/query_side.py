"""Export of a pair's query side, a checkpoint, to graphs in several precisions."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from core.choices import ExportPrecision
from core.encoders import EncoderSpec, Pair
from core.errors import CareError, ProviderError
from core.scratch import temporary_folder
from models.encoders.onnx import OnnxEncoder
from models.encoders.providers import ProviderOptions
from models.encoders.tokenizer import file_tokenizer
from models.encoders.transformers import TransformersEncoder
from training.export.checkpoint import write_checkpoint
from training.export.measurement import Reference, Row
from training.export.onnx import describe, export_encoder, half_precision, save
from training.export.quantization import quantize_int8

ENGINES = "tensorrt"


def load_query_side(pair: Pair) -> TransformersEncoder:
    """Loads the query side in float32, with the attention that exporter and optimizers support.

    The weights of an ONNX graph, as care-mini has, are dequantised.
    """
    with temporary_folder() as folder:
        spec = pair.query
        if spec.format == "onnx":
            spec = write_checkpoint(spec, pair.folder, folder / "query")
        encoder = TransformersEncoder(spec, pair.folder, device="cpu", dtype="float32")
    encoder.parts()[0].set_attn_implementation("eager")
    return encoder


@dataclass(frozen=True, slots=True)
class Exporter:
    """Exports graphs of an encoder and compares them with it."""

    encoder: TransformersEncoder  # as `load_query_side` returns it
    folder: Path  # folder of the graphs, which holds the tokenizer
    reference: Reference  # vectors to compare with
    calibration: Sequence[str]  # typical queries for int8
    provider: ProviderOptions  # execution provider for measurements
    threads: int

    def export(self, precision: ExportPrecision) -> tuple[Row, EncoderSpec | None]:
        """Exports one precision; returns its row and, if it passed, the spec of the graph.

        Files of a precision that fails are deleted. `fp32` must be exported first, because
        `fp16` and `int8` are made from its file.
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

    def _make(self, precision: ExportPrecision) -> onnx.ModelProto:
        spec = self.encoder.spec
        if precision in ("fp32", "tensorrt"):
            model, dense, _ = self.encoder.parts()
            fuse = precision == "fp32"
            return export_encoder(
                model, spec.pooling, dense, spec.dimension, fuse=fuse, max_length=spec.max_length
            )
        fp32 = self.folder / "query-fp32.onnx"
        graph = onnx.load(fp32)
        # The metadata hold the checksum of a second file, which smaller weights may not have.
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
                # Loading builds the TensorRT engine, which is then measured.
                encoder = OnnxEncoder(spec, self.folder, self.threads, engines)
                return encoder, replace(row, provider="tensorrt")
            except ProviderError as error:
                row = replace(row, reason=f"building the TensorRT engine failed: {error}")
        return OnnxEncoder(spec, self.folder, self.threads, self.provider), row


def _megabytes(weights: Path) -> float:
    files = (weights, weights.with_name(f"{weights.name}.data"))
    return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, CareError) else f"{type(error).__name__}: {text}"
