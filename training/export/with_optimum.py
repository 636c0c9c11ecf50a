"""Export of a query side by optimum, measured as exports of this package are.

    make export-optimum PAIR=bge-base-zh-v1.5 OUT=pairs/bge-base-optimum

optimum-onnx 0.1.0 needs transformers below 4.58, so it runs in an environment of its own. Its
graphs are float32, not fused, and of the architectures that it knows, such as BERT and XLM-RoBERTa.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import onnx

from core.encoders import EncoderSpec, Pair
from core.errors import CareError
from core.files import new_folder, write_text
from core.records import write_json
from core.scratch import temporary_folder
from core.terminal import run, shown
from models.encoders.onnx import OUTPUT, OnnxEncoder
from models.pairs import PAIR, load_pair, write_pair
from training.export.checkpoint import write_checkpoint
from training.export.measurement import Reference, Row, as_markdown, read_calibration
from training.export.onnx import TOKENIZER, describe
from training.export.query_side import load_query_side
from training.files import read_json

_GRAPH = "query-fp32.onnx"
_LINES = 5


def export_with_optimum(pair: Pair, out: Path, python: Path) -> Path:
    """Exports a query side with optimum, by the interpreter `python`; replaces an earlier export.

    Returns the path of `pair.toml`, beside graph, tokenizer and `report.md`.
    """
    query = load_query_side(pair)
    calibration = read_calibration(None)
    with new_folder(out.resolve(), replace=True) as folder, temporary_folder() as scratch:
        source, written = scratch / "source", scratch / "written"
        spec = write_checkpoint(pair.query, pair.folder, source)
        # transformers 4 does not know the classes of tokenizers that transformers 5 writes.
        tokenizer = source / "tokenizer_config.json"
        write_json(tokenizer, read_json(tokenizer) | {"tokenizer_class": "PreTrainedTokenizerFast"})
        _run_optimum(python, source, written)
        query.parts()[2].save(str(folder / TOKENIZER), pretty=False)
        described = _describe(spec, written / "model.onnx", folder / _GRAPH)
        encoder = OnnxEncoder(described, folder, threads=1)
        values = Reference(query, calibration, None).measure(encoder)
        row = Row("fp32", "cpu", _GRAPH, values=values)
        if row.failures:
            message = f"the graph of optimum misses its thresholds: {'; '.join(row.failures)}"
            raise CareError(message, code="threshold_missed", failures=row.failures)
        write_text(folder / "report.md", as_markdown(f"{pair.name} by optimum", [row], []))
        write_pair(pair.model_copy(update={"query": described}), folder / PAIR)
    return out / PAIR


def _run_optimum(python: Path, source: Path, written: Path) -> None:
    command = [str(python), "-m", "optimum.exporters.onnx", "--model", str(source)]
    command += ["--task", "feature-extraction", "--library", "sentence_transformers", str(written)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (written / "model.onnx").is_file():
        reason = " ".join(done.stderr.strip().splitlines()[-_LINES:])
        message = f"optimum did not export {source.name}: {reason}"
        raise CareError(message, code="optimum_failed")


def _describe(spec: EncoderSpec, source: Path, path: Path) -> EncoderSpec:
    """Keeps the output of sentence vectors only, and returns the spec of the graph."""
    model = onnx.load(source)
    outputs = [value for value in model.graph.output if value.name == OUTPUT]
    del model.graph.output[:]
    model.graph.output.extend(outputs)
    onnx.save(model, path)
    if (data := source.with_name("model.onnx_data")).is_file():
        shutil.move(data, path.parent)
    return describe(spec.model_dump(exclude={"adapter", "config"}), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", required=True, help="name or path of the pair")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    parser.add_argument("--python", required=True, type=Path, help="Python with optimum-onnx")
    arguments = parser.parse_args()
    path = export_with_optimum(load_pair(arguments.pair), arguments.out, arguments.python)
    print(shown(f"wrote {path}; it reaches the thresholds of fp32"))  # noqa: T201


if __name__ == "__main__":
    sys.exit(run(main))
