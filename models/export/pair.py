"""From a pair of checkpoints to a folder that the service and the indexer run."""

import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from core.errors import CareError
from core.files import sha256_file, write_text
from core.types import EncoderSpec, Pair
from models.encoders.loading import load_encoder
from models.encoders.providers import ON_CPU, ProviderOptions
from models.export.data import read_calibration, read_judged
from models.export.document_side import DocumentForm, export_document_side
from models.export.gates import Precision
from models.export.measurement import Rankings, Reference
from models.export.onnx import OPSET
from models.export.query_side import ENGINES, TOKENIZER, Exporter, QuerySide
from models.export.report import Row, as_json, as_markdown
from models.pairs import write_pair
from models.training.folders import publish, writing

PAIR, REPORT, FIGURES, DOCUMENT = "pair.toml", "report.md", "report.json", "document"

# What computes in a precision, and does not only store weights in it.
_NATIVE: dict[str, tuple[Precision, ...]] = {"cpu": ("fp32", "int8"), "cuda": ("fp32", "fp16")}
_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "tokenizers", "numpy")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to export, and what to measure it with.

    Attributes:
        out: The folder of the export; an earlier export in it is replaced.
        precisions: Precisions beside float32, which is always exported.
        document: Form of the document side; `none` leaves it where it is.
        calibration: JSONL with `text`, or None; see `read_calibration`.
        judged: Files of corpus, queries and qrels, or None to measure no rankings.
        provider: What the service will encode on: figures are of it.
        threads: Threads of the processor.
    """

    out: Path
    precisions: Sequence[Precision]
    document: DocumentForm
    calibration: Path | None
    judged: tuple[Path, Path, Path] | None
    threads: int
    provider: ProviderOptions = ON_CPU


def export_pair(pair: Pair, options: ExportOptions, report: Callable[[str], None]) -> Path:
    """Exports a pair.

    The folder has a graph and a TOML file of each precision that passed its gates, `pair.toml`
    of the smallest of them that the provider computes in, and the report. It appears whole.

    Args:
        pair: A pair whose query side is a checkpoint of transformers.
        options: What to export.
        report: Called with each line of progress.

    Returns:
        The recommended TOML file.

    Raises:
        PairError: If a side is no checkpoint, does not load or cannot be exported.
        CareError: If the float32 graph fails a gate, data is wrong, or the disk fails.
    """
    out = options.out.resolve()
    _check_replaceable(out)
    calibration = read_calibration(options.calibration)
    judged = read_judged(*options.judged) if options.judged else None
    side = QuerySide.of(pair)
    rankings = None
    if judged:
        report(f"encoding {len(judged.documents)} documents by {pair.document.model}")
        rankings = Rankings.of(judged, load_encoder(pair.document, pair.folder), side.encoder)
    reference = Reference.of(side.encoder, calibration, rankings)
    with writing(out), _new_folder(out) as folder:
        side.encoder.parts()[2].save(str(folder / TOKENIZER), pretty=False)
        exporter = Exporter(side, folder, reference, calibration, options.provider, options.threads)
        rows, specs = _export_query_side(exporter, options.precisions, report)
        lines = _conditions(options, reference, rows)
        if options.document != "none":
            document, cosine = export_document_side(
                pair, options.document, folder / DOCUMENT, list(reference.texts[:6])
            )
            pair = pair.model_copy(update={"document": document})
            lines.append(f"document side: {options.document}, cosine {cosine:.6f} to what it was")
        for precision, spec in specs.items():
            _write_pair(pair, spec, folder / f"pair-{precision}.toml")
        best = _recommended(rows, options.provider)
        _write_pair(pair, specs[best], folder / PAIR)
        lines.insert(0, f"{PAIR}: {best}")
        write_text(folder / REPORT, as_markdown(pair.name, rows, lines))
        write_text(folder / FIGURES, as_json(rows, _facts(pair, best, options, reference)))
    report(f"pair {options.out / PAIR}: {best}; set CARE_PAIR to it")
    return options.out / PAIR


def _export_query_side(
    exporter: Exporter, precisions: Sequence[Precision], report: Callable[[str], None]
) -> tuple[list[Row], dict[Precision, EncoderSpec]]:
    rows: list[Row] = []
    specs: dict[Precision, EncoderSpec] = {}
    for precision in dict.fromkeys(("fp32", *precisions)):
        row, spec = exporter.export(precision)
        rows.append(row)
        if spec:
            specs[precision] = spec
        elif precision == "fp32":
            raise CareError(
                f"the exported graph is not its checkpoint's equal: {'; '.join(row.failures)}"
            )
        report(_summary(row))
    return rows, specs


def _summary(row: Row) -> str:
    if row.failures:
        return f"{row.precision}: failed, files removed: {'; '.join(row.failures)}"
    assert row.measured
    speed = row.measured.speed
    return (
        f"{row.precision}: {row.megabytes:.1f} MB, cosine {row.measured.cosine:.6f}, "
        f"{speed.p50_ms:.2f} ms a query, {speed.batch_rate:.0f} queries/s in batches"
    )


def _recommended(rows: Sequence[Row], provider: ProviderOptions) -> Precision:
    usable = [row for row in rows if not row.failures and row.precision in _NATIVE[provider.name]]
    return min(usable, key=lambda row: row.megabytes).precision


def _write_pair(pair: Pair, query: EncoderSpec, path: Path) -> None:
    write_pair(pair.model_copy(update={"query": query}), path)


def _conditions(options: ExportOptions, reference: Reference, rows: Sequence[Row]) -> list[str]:
    tokens, rankings = reference.tokens, reference.rankings
    judged = "none"
    if options.judged and rankings:
        counts = (
            f"{len(rankings.judged.documents)} documents, {len(rankings.judged.queries)} queries"
        )
        judged = f"{counts} of {options.judged[0]}; nDCG@10 of the checkpoint {rankings.ndcg:.4f}"
    return [
        f"times: {options.provider.name}, {options.threads} threads, {platform.machine()}",
        f"texts: {len(tokens)} of {tokens[0]} to {tokens[-1]} tokens, alone and in three batches",
        f"rankings: {judged}",
        f"calibration of int8: {options.calibration or 'the questions of the embedded pair'}",
        _engine_line(rows),
    ]


def _engine_line(rows: Sequence[Row]) -> str:
    for row in rows:
        if row.provider == "tensorrt" and not row.failures:
            return f"TensorRT: engine in {ENGINES}/, for this GPU: CARE_TENSORRT_CACHE"
        if row.precision == "tensorrt" and row.reason:
            return f"TensorRT: {row.reason}"
    return "TensorRT: no engine was built, ONNX Runtime has none here or it was not asked for"


def _facts(
    pair: Pair, best: Precision, options: ExportOptions, reference: Reference
) -> dict[str, object]:
    files = [*(options.judged or ()), *([options.calibration] if options.calibration else [])]
    return {
        "pair": pair.name,
        "embedding_space": pair.embedding_space,
        "query": pair.query.model_dump(mode="json"),
        "document_form": options.document,
        "recommended": best,
        "provider": options.provider.name,
        "threads": options.threads,
        "machine": platform.machine(),
        "opset": OPSET,
        "tokens": reference.tokens,
        "data": {path.name: sha256_file(path) for path in files},
        "python": platform.python_version(),
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


def _check_replaceable(out: Path) -> None:
    """Lets nothing but an earlier export be replaced."""
    if not out.exists() or (out / FIGURES).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise CareError(f"{out} holds something else than an export: name another folder")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yields a hidden folder that takes the place of `out` when the block succeeds."""
    temporary, earlier = (out.with_name(f".{out.name}.{end}") for end in ("tmp", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if out.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            out.rename(earlier)
        publish(temporary, out)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
