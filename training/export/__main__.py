"""Exports a pair for the service, the indexer or other libraries: `python -m training.export`."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import onnxruntime as ort

from core.cli import positive_int, run
from core.cpus import available_cpus
from models.encoders.providers import TENSORRT, ProviderOptions
from models.pairs import load_pair
from training.export.checkpoint import DocumentForm
from training.export.measurement import read_calibration
from training.export.pair import ExportOptions, export_pair
from training.export.report import Precision

_SAMPLE = Path(__file__).parents[2] / "data" / "sample"
# An installed package comes without the sample.
_CORPUS = _SAMPLE / "corpus.jsonl" if _SAMPLE.is_dir() else Path("none")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    return run(partial(_export, options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.export",
        description="Exports a pair: its query side, a checkpoint, to ONNX, if it reaches "
        "acceptance thresholds; or both sides as one model of sentence-transformers.",
    )
    add = parser.add_argument
    add("--pair", required=True, help="name of a registered pair, or a .toml file")
    add("--out", type=Path, required=True, help="folder for the exported pair")
    add("--format", choices=["onnx", "sentence-transformers"], default="onnx", help="what to write")
    add(
        "--precision",
        type=_precisions,
        help="of fp32, fp16, int8, tensorrt, with commas; fp32 is always among them; default: "
        "fp32,fp16,int8 and, where ONNX Runtime has TensorRT, tensorrt",
    )
    add("--document", choices=get_args(DocumentForm), default="none", help="export it too, as")
    add("--calibration", type=Path, help="JSONL of typical queries, `text`, that scale int8")
    add("--corpus", type=Path, default=_CORPUS, help="JSONL, or none")
    add("--queries", type=Path, default=_SAMPLE / "queries.jsonl", help="JSONL, _id and text")
    add("--qrels", type=Path, default=_SAMPLE / "qrels" / "train.tsv", help="TSV, as in BEIR")
    add("--provider", choices=["cpu", "cuda"], default="cpu", help="what the service will run on")
    add("--threads", type=positive_int, default=available_cpus(), help="threads of the processor")
    return parser


def _precisions(text: str) -> tuple[Precision, ...]:
    known: tuple[Precision, ...] = get_args(Precision)
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return tuple(name for name in known if name in text.split(","))


def _export(options: argparse.Namespace) -> None:
    pair = load_pair(options.pair)
    if options.format == "sentence-transformers":
        # The library takes seconds to import.
        from training.export.sentence_transformers import export_sentence_transformers

        texts = read_calibration(options.calibration)
        export_sentence_transformers(pair, options.out, texts, print)
        return
    default: tuple[Precision, ...] = ("fp32", "fp16", "int8")
    if TENSORRT in ort.get_available_providers():
        default = (*default, "tensorrt")
    measured = options.corpus != Path("none")
    what = ExportOptions(
        out=options.out,
        precisions=options.precision or default,
        document=options.document,
        calibration=options.calibration,
        judged=(options.corpus, options.queries, options.qrels) if measured else None,
        threads=options.threads,
        provider=ProviderOptions(options.provider),
    )
    export_pair(pair, what, print)


if __name__ == "__main__":
    sys.exit(main())
