"""Export of a pair of checkpoints to a folder for the service and the indexer."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from core.choices import ExportPrecision
from core.encoders import EncoderSpec, Pair
from core.errors import CareError
from core.files import new_folder, sha256_file, write_text
from core.provenance import environment
from core.records import write_json
from models.encoders.factory import load_encoder
from models.encoders.providers import ON_CPU, ProviderOptions
from models.pairs import PAIR, write_pair
from training.export.checkpoint import DocumentForm, export_document_side
from training.export.measurement import (
    THRESHOLDS,
    Judged,
    Rankings,
    Reference,
    Row,
    as_markdown,
    read_calibration,
)
from training.export.onnx import OPSET, TOKENIZER
from training.export.query_side import ENGINES, Exporter, load_query_side

REPORT, RESULTS, DOCUMENT = "report.md", "report.json", "document"

# Precisions that a provider computes in; in others it only stores weights.
_NATIVE: dict[str, tuple[ExportPrecision, ...]] = {
    "cpu": ("fp32", "int8"),
    "cuda": ("fp32", "fp16"),
}


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """Options of an export."""

    out: Path  # folder to write; replaces an earlier export
    precisions: Sequence[ExportPrecision]  # precisions of the query side; fp32 is always exported
    document: DocumentForm  # form in which to export the document side
    calibration: Path | None  # JSONL of typical queries for int8; None for those of `care-mini`
    # Files of corpus, queries and qrels, or None to measure no rankings.
    judged: tuple[Path, Path, Path] | None
    threads: int  # CPU threads for measurements
    provider: ProviderOptions = ON_CPU  # execution provider that the service will use


def export_pair(pair: Pair, options: ExportOptions, report: Callable[[str], None]) -> Path:
    """Exports a pair whose query side is a checkpoint; returns the path of `pair.toml`.

    The folder holds a graph and a TOML file for each precision that reaches its acceptance
    thresholds, `pair.toml` for the smallest of these that the provider computes in, and a report.
    It is written to a temporary folder and renamed, and replaces an earlier export.
    """
    out = options.out.resolve()
    if out.exists() and not (out / RESULTS).is_file() and (out.is_file() or any(out.iterdir())):
        reason = "is not empty and not an earlier export: choose another folder"
        raise CareError.at(out, reason, "not_an_export")
    calibration = read_calibration(options.calibration)
    judged = Judged.read(*options.judged) if options.judged else None
    query = load_query_side(pair)
    rankings = None
    if judged:
        report(f"encoding {len(judged.documents)} documents with {pair.document.model}")
        rankings = Rankings(judged, load_encoder(pair.document, pair.folder), query)
    reference = Reference(query, calibration, rankings)
    with new_folder(out, replace=True) as folder:
        query.parts()[2].save(str(folder / TOKENIZER), pretty=False)
        exporter = Exporter(
            query, folder, reference, calibration, options.provider, options.threads
        )
        rows, specs = _export_query_side(exporter, options.precisions, report)
        lines = _conditions(options, reference, rows)
        if options.document != "none":
            texts = reference.texts[:6]
            place = folder / DOCUMENT
            document, cosine = export_document_side(pair, options.document, place, texts)
            pair = pair.model_copy(update={"document": document})
            lines.append(
                f"document side: {options.document}, lowest cosine {cosine:.6f} to the original"
            )
        best = recommended(rows, options.provider)
        named = {f"pair-{precision}.toml": spec for precision, spec in specs.items()}
        for name, spec in (named | {PAIR: specs[best]}).items():
            write_pair(pair.model_copy(update={"query": spec}), folder / name)
        lines.insert(0, f"{PAIR}: {best}")
        files = [*(options.judged or ()), *([options.calibration] if options.calibration else [])]
        facts = {
            "pair": pair.name,
            "embedding_space": pair.embedding_space,
            "query": pair.query.model_dump(mode="json"),
            "document_form": options.document,
            "recommended": best,
            "provider": options.provider.name,
            "threads": options.threads,
            "opset": OPSET,
            "tokens": reference.tokens,
            "data": {path.name: sha256_file(path) for path in files},
            **environment(),
            "thresholds": THRESHOLDS,
            "precisions": [asdict(row) | {"failures": row.failures} for row in rows],
        }
        write_text(folder / REPORT, as_markdown(pair.name, rows, lines))
        write_json(folder / RESULTS, facts)
    report(f"wrote {options.out / PAIR} ({best})")
    return options.out / PAIR


def _export_query_side(
    exporter: Exporter, precisions: Sequence[ExportPrecision], report: Callable[[str], None]
) -> tuple[list[Row], dict[ExportPrecision, EncoderSpec]]:
    rows: list[Row] = []
    specs: dict[ExportPrecision, EncoderSpec] = {}
    for precision in dict.fromkeys(("fp32", *precisions)):
        row, spec = exporter.export(precision)
        rows.append(row)
        if spec:
            specs[precision] = spec
            report(
                f"{precision}: {row.megabytes:.1f} MB, cosine {row.values['cosine']:.6f}, "
                f"{row.values['p50 ms']:.2f} ms per query, "
                f"{row.values['queries/s']:.0f} queries/s in batches"
            )
        elif precision == "fp32":
            message = f"the float32 graph misses its thresholds: {'; '.join(row.failures)}"
            raise CareError(message, code="threshold_missed", failures=row.failures)
        else:
            report(f"{precision}: failed, its files are deleted: {'; '.join(row.failures)}")
    return rows, specs


def recommended(rows: Sequence[Row], provider: ProviderOptions) -> ExportPrecision:
    """Returns the passed precision with the smallest file among those the provider computes in."""
    usable = [row for row in rows if not row.failures and row.precision in _NATIVE[provider.name]]
    return min(usable, key=lambda row: row.megabytes).precision


def _conditions(options: ExportOptions, reference: Reference, rows: Sequence[Row]) -> list[str]:
    """Returns lines on how the values were measured."""
    tokens, rankings = reference.tokens, reference.rankings
    ranked = "none"
    if options.judged and rankings:
        judged = rankings.judged
        ranked = (
            f"{len(judged.documents)} documents, {len(judged.queries)} queries of "
            f"{options.judged[0]}; nDCG@10 of the checkpoint {rankings.ndcg:.4f}"
        )
    engine = "no engine, because it was not requested or ONNX Runtime lacks TensorRT"
    for row in rows:
        if row.provider == "tensorrt" and not row.failures:
            engine = f"engine for this GPU in {ENGINES}/: set CARE_TENSORRT_CACHE to this folder"
        elif row.precision == "tensorrt" and row.reason:
            engine = row.reason
    return [
        f"times: {options.provider.name}, {options.threads} threads, {platform.machine()}",
        f"texts: {len(tokens)} of {tokens[0]} to {tokens[-1]} tokens, alone and in three batches",
        f"rankings: {ranked}",
        f"calibration of int8: {options.calibration or 'the queries of care-mini'}",
        f"TensorRT: {engine}",
    ]
