"""Exports a pair for the service and the indexer: `python -m models.export --help`."""

import argparse
import sys
from pathlib import Path
from typing import get_args

from core.cpus import available_cpus
from core.errors import CareError
from models.encoders.providers import ProviderOptions
from models.export.document_side import DocumentForm
from models.export.gates import Precision
from models.export.onnx import tensorrt_is_installed
from models.export.pair import ExportOptions, export_pair
from models.pairs import load_pair

_SAMPLE = Path(__file__).parents[2] / "data" / "sample"


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    try:
        options = _parser().parse_args(arguments)
        export_pair(load_pair(options.pair), _options(options), print)
    except CareError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.export",
        description="Exports the query side of a pair, a checkpoint, to ONNX, held to gates.",
    )
    add = parser.add_argument
    add("--pair", required=True, help="name of a registered pair, or a .toml file")
    add("--out", type=Path, required=True, help="folder for the exported pair")
    add(
        "--precision",
        type=_precisions,
        help="of fp32, fp16, int8, tensorrt, with commas; fp32 is always among them; default: "
        "fp32,fp16,int8 and, where ONNX Runtime has TensorRT, tensorrt",
    )
    add("--document", choices=get_args(DocumentForm), default="none", help="export it too, as")
    add("--calibration", type=Path, help="JSONL of typical queries, `text`, that scale int8")
    add("--corpus", type=Path, default=_SAMPLE / "corpus.jsonl", help="JSONL, or none")
    add("--queries", type=Path, default=_SAMPLE / "queries.jsonl", help="JSONL, _id and text")
    add("--qrels", type=Path, default=_SAMPLE / "qrels.tsv", help="TSV: query-id corpus-id score")
    add("--provider", choices=["cpu", "cuda"], default="cpu", help="what the service will run on")
    add("--threads", type=int, default=available_cpus(), help="threads of the processor")
    return parser


def _precisions(text: str) -> tuple[Precision, ...]:
    known: tuple[Precision, ...] = get_args(Precision)
    if unknown := set(text.split(",")) - set(known):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return tuple(name for name in known if name in text.split(","))


def _options(options: argparse.Namespace) -> ExportOptions:
    default: tuple[Precision, ...] = ("fp32", "fp16", "int8")
    if tensorrt_is_installed():
        default = (*default, "tensorrt")
    measured = options.corpus != Path("none")
    return ExportOptions(
        out=options.out,
        precisions=options.precision or default,
        document=options.document,
        calibration=options.calibration,
        judged=(options.corpus, options.queries, options.qrels) if measured else None,
        threads=options.threads,
        provider=ProviderOptions(options.provider),
    )


if __name__ == "__main__":
    sys.exit(main())
