"""From a pair whose query side is a checkpoint to one that the service can run."""

from pathlib import Path

from core.cpus import available_cpus
from core.errors import PairError
from core.files import sha256_file, writing_in
from core.types import EncoderSpec, Pair
from models.encoders.onnx import OnnxEncoder
from models.encoders.transformers import TransformersEncoder
from models.export.onnx import export_encoder, save
from models.export.parity import Parity, measure_parity
from models.pairs import write_pair

WEIGHTS, TOKENIZER, PAIR = "query.onnx", "tokenizer.json", "pair.toml"


def export_query_side(pair: Pair, out: Path) -> tuple[Path, Parity]:
    """Exports the query side as a float32 graph of ONNX and holds it to its checkpoint.

    The folder then has the graph, `tokenizer.json` and, written last, the TOML file of the
    same pair with them as its query side. Its document side and its space are unchanged.

    Args:
        pair: A pair whose query side is a checkpoint of transformers.
        out: The folder to write to.

    Returns:
        The TOML file, and how near the graph is to the checkpoint.

    Raises:
        PairError: If the query side is no checkpoint, does not load or cannot be exported.
        CareError: If the graph is not the checkpoint's equal, or the disk fails.
    """
    spec = pair.query
    if spec.format == "onnx":
        raise PairError(f"the query side of '{pair.name}' is in ONNX already")
    encoder = TransformersEncoder(spec, pair.folder, device="cpu", dtype="float32")
    model, dense, tokenizer = encoder.parts()
    model.set_attn_implementation("eager")
    graph = export_encoder(model, spec.pooling, dense, spec.dimension)
    with writing_in(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / PAIR).unlink(missing_ok=True)
        save(graph, out / WEIGHTS)
        tokenizer.save(str(out / TOKENIZER), pretty=False)
    exported = _exported(spec, out.resolve())
    parity = measure_parity(encoder, OnnxEncoder(exported, out, available_cpus()), out / WEIGHTS)
    parity.check()
    with writing_in(out):
        write_pair(pair.model_copy(update={"query": exported}), out / PAIR)
    return out / PAIR, parity


def _exported(spec: EncoderSpec, out: Path) -> EncoderSpec:
    files = {"weights": out / WEIGHTS, "tokenizer": out / TOKENIZER}
    return EncoderSpec.model_validate(
        spec.model_dump(exclude={"adapter", "config"})
        | {"format": "onnx"}
        | {name: str(path) for name, path in files.items()}
        | {f"{name}_sha256": sha256_file(path) for name, path in files.items()}
    )
