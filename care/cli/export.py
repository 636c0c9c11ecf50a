"""`care export`: a trained pair for the service and the indexer, or for sentence-transformers."""

import shlex
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer
from typer import Option

from care.cli.options import Json
from care.cli.output import program, reporter, show
from care.extras import require
from care.options import PairName, file, folder
from core.choices import ExportPrecision
from core.machine import available_cpus

# An installed package has no sample.
_SAMPLE = Path(__file__).parents[2] / "data" / "sample"
_NONE = "none"


def export(
    pair: PairName,
    out: Annotated[Path, folder("Folder of the exported pair.")],
    format_: Annotated[
        Literal["onnx", "sentence-transformers"],
        Option("--format", help="The query side in ONNX, or both sides as one model."),
    ] = "onnx",
    precision: Annotated[
        str | None,
        Option(
            metavar="NAMES",
            help="Precisions to export, separated by commas: fp32, fp16, int8, tensorrt. fp32 is "
            "always exported.",
            show_default="fp32,fp16,int8 and, if ONNX Runtime has TensorRT, tensorrt",
        ),
    ] = None,
    document: Annotated[
        Literal["merged", "adapter", "none"],
        Option(
            help="How to export the document side: with LoRA layers merged, as a LoRA adapter, or "
            "not at all."
        ),
    ] = "none",
    calibration: Annotated[
        Path | None,
        file(
            "JSONL of typical queries with text, to calibrate int8.",
            show_default="those of care-mini",
        ),
    ] = None,
    corpus: Annotated[
        str,
        file(
            "JSONL of documents to measure rankings on, or none.",
            show_default="the sample, in a checkout",
        ),
    ] = str(_SAMPLE / "corpus.jsonl") if _SAMPLE.is_dir() else _NONE,
    queries: Annotated[
        Path, file("JSONL with _id and text.", show_default="the sample's")
    ] = _SAMPLE / "queries.jsonl",
    qrels: Annotated[
        Path, file("TSV with query-id, corpus-id and score.", show_default="the sample's split dev")
    ] = _SAMPLE / "qrels" / "dev.tsv",
    provider: Annotated[
        Literal["cpu", "cuda"], Option(help="Processor that the service will run on.")
    ] = "cpu",
    threads: Annotated[
        int, Option(min=1, help="Threads of the measurements.", show_default="all processors")
    ] = available_cpus(),
    json_: Json = False,
) -> None:
    """Export a pair for the service and the indexer, or to sentence-transformers.

    The query side is written in ONNX, the document side as --document says. A precision that
    misses its acceptance thresholds is deleted; report.md has the measurements.
    """
    chosen = _precisions(precision) if precision else None
    require("train", make="export")
    from models.pairs import load_pair, pairs_folder

    loaded = load_pair(pair)
    report = reporter(as_json=json_)
    if format_ == "sentence-transformers":
        from training.export.measurement import read_calibration
        from training.export.sentence_transformers import export_sentence_transformers

        export_sentence_transformers(loaded, out, read_calibration(calibration), report)
        show({"model": out}, [], as_json=json_)
        return
    import onnxruntime as ort

    from models.encoders.providers import TENSORRT, ProviderOptions
    from training.export.pair import ExportOptions, export_pair

    default: tuple[ExportPrecision, ...] = ("fp32", "fp16", "int8")
    if TENSORRT in ort.get_available_providers():
        default = (*default, "tensorrt")
    options = ExportOptions(
        out=out,
        precisions=chosen or default,
        document=document,
        calibration=calibration,
        judged=None if corpus == _NONE else (Path(corpus), queries, qrels),
        threads=threads,
        provider=ProviderOptions(provider),
    )
    exported = export_pair(loaded, options, report)
    # A pair in the folder of trained pairs is found by its name.
    found = out.resolve().parent == pairs_folder().resolve()
    name = shlex.quote(out.resolve().name if found else str(exported))
    following = [
        f"next: {program()} index CORPUS --index NAME --pair {name}",
        f"then: {program()} serve --index NAME --pair {name}",
    ]
    show({"pair": exported}, following, as_json=json_)


def _precisions(text: str) -> tuple[ExportPrecision, ...]:
    known: tuple[ExportPrecision, ...] = get_args(ExportPrecision)
    if unknown := set(text.split(",")) - set(known):
        message = f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}"
        raise typer.BadParameter(message, param_hint="--precision")
    return tuple(name for name in known if name in text.split(","))
