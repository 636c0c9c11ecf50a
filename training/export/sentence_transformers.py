"""Export of a pair as one sentence-transformers model: a Router with a route for each side."""

from collections.abc import Callable
from pathlib import Path

from sentence_transformers import SentenceTransformer

from core.encoders import EncoderSpec, Pair
from core.files import new_folder
from core.records import write_json
from models.encoders.cached import encode_texts
from models.encoders.factory import load_encoder
from models.encoders.modules import TYPES, write_prompts
from models.pairs import write_pair
from training.export.checkpoint import check_vectors, write_checkpoint
from training.files import read_json

# ONNX graphs may have 8-bit activations, which the exported model does not.
_LEAST_COSINE = {"onnx": 0.99, "transformers": 0.9999}


def export_sentence_transformers(
    pair: Pair, out: Path, texts: list[str], report: Callable[[str], None]
) -> None:
    """Writes both sides of a pair as a model that sentence-transformers and mteb load.

    The folder holds `query/` and `document/`, each a complete model (see `write_checkpoint`), and
    a Router over both: `encode_query` and `encode_document` use the route, prompt and maximum
    length of their side; `encode` is `encode_query`. `pair.toml` describes the same checkpoints
    for this project's commands. Vectors of `texts` must equal those of the pair.
    """
    # sentence-transformers loads a Router from an absolute path only.
    with new_folder(out.resolve()) as folder:
        written: dict[str, EncoderSpec] = {
            spec.role: write_checkpoint(spec, pair.folder, folder / spec.role, truncate=True)
            for spec in (pair.query, pair.document)
        }
        _write_router(pair, folder)
        model = SentenceTransformer(str(folder), device="cpu")
        encoders = {"query": model.encode_query, "document": model.encode_document}
        for spec in (pair.query, pair.document):
            side = load_encoder(spec, pair.folder, dtype="float32", device="cpu")
            cosine = check_vectors(
                encoders[spec.role](texts),
                encode_texts(side, texts),
                written[spec.role],
                folder,
                _LEAST_COSINE[spec.format],
            )
            report(f"{spec.role} side: lowest cosine to the pair's vectors {cosine:.6f}")
        write_pair(pair.model_copy(update={**written}), folder / "pair.toml")
    report(f"wrote {out}")


def _write_router(pair: Pair, folder: Path) -> None:
    types: dict[str, str] = {}
    structure: dict[str, list[str]] = {}
    for role in ("query", "document"):
        rows = read_json(folder / role / "modules.json")
        modules = {Path(role, row["path"]).as_posix(): row["type"] for row in rows}
        types |= modules
        structure[role] = list(modules)
    router = {"idx": 0, "name": "0", "path": "", "type": f"{TYPES}Router"}
    write_json(folder / "modules.json", [router])
    parameters = {"default_route": "query", "allow_empty_key": False}
    config = {"types": types, "structure": structure, "parameters": parameters}
    write_json(folder / "router_config.json", config)
    prompts = {"query": pair.query.prompt, "document": pair.document.prompt}
    write_prompts(folder, prompts, default="query")
