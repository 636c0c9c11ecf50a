"""Token vectors for late interaction as a second output of exported graphs."""

import hashlib
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors import SafetensorError
from safetensors.numpy import load_file

from core.choices import Codec
from core.encoders import EncoderSpec, LateInteraction, Pair, Role
from core.errors import CareError, PairError
from core.files import new_folder
from core.machine import available_cpus
from core.types import FloatArray
from models.encoders.onnx import OUTPUT, TOKEN_OUTPUT, OnnxEncoder
from models.pairs import PAIR, write_pair
from training.export.measurement import read_calibration
from training.export.onnx import TOKENIZER, describe, save

# Texts whose sentence vectors are compared with those of the original graph.
_COMPARED = 16
# Digits of the checksum of projections that name the space of their token vectors.
_DIGITS = 12

_NORMALIZATIONS = {
    "LayerNormalization",
    "SkipLayerNormalization",
    "SimplifiedLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}


def add_token_output(model: onnx.ModelProto, projection: FloatArray) -> onnx.ModelProto:
    """Adds the output `token_embeddings`, float32 [n, length, k], to a graph of this package.

    A token vector is the projected state of the last layer with unit norm; vectors of padding are
    zero. The other nodes of the graph are not changed: `sentence_embedding` stays the same.

    Args:
        model: A graph of `training.export.onnx` or `training.export.quantization`.
        projection: float32 [width, k].
    """
    if any(output.name == TOKEN_OUTPUT for output in model.graph.output):
        raise ValueError(f"the graph has the output {TOKEN_OUTPUT} already")
    states, width = _last_states(model.graph)
    if len(projection) != width:
        raise ValueError(f"states have {width} dimensions, the projection takes {len(projection)}")
    copy = deepcopy(model)
    constants = {"projection": projection.astype(np.float32), "axis": np.array([-1])}
    names = {
        part: f"{TOKEN_OUTPUT}/{part}"
        for part in (*constants, "states", "projected", "unit", "mask", "column")
    }
    to_float: dict[str, Any] = {"to": TensorProto.FLOAT}
    steps: list[tuple[str, list[str], str, dict[str, Any]]] = [
        ("Cast", [states], names["states"], to_float),
        ("MatMul", [names["states"], names["projection"]], names["projected"], {}),
        ("LpNormalization", [names["projected"]], names["unit"], {"axis": -1, "p": 2}),
        ("Cast", ["attention_mask"], names["mask"], to_float),
        ("Unsqueeze", [names["mask"], names["axis"]], names["column"], {}),
        ("Mul", [names["unit"], names["column"]], TOKEN_OUTPUT, {}),
    ]
    copy.graph.initializer.extend(
        numpy_helper.from_array(array, names[part]) for part, array in constants.items()
    )
    copy.graph.node.extend(
        helper.make_node(kind, inputs, [output], name=output, **attributes)
        for kind, inputs, output, attributes in steps
    )
    shape = ["n", "length", projection.shape[1]]
    copy.graph.output.append(helper.make_tensor_value_info(TOKEN_OUTPUT, TensorProto.FLOAT, shape))
    return copy


def _last_states(graph: onnx.GraphProto) -> tuple[str, int]:
    """Returns the tensor of the last layer's states, and their dimensions.

    It is the output of the last normalisation before the pooling.
    """
    producers = {name: node for node in graph.node for name in node.output}
    sizes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    reached = [OUTPUT]
    for name in reached:
        node = producers.get(name)
        if node is None:
            continue
        if node.op_type in _NORMALIZATIONS:
            (width,) = next(sizes[part] for part in node.input if len(sizes.get(part, ())) == 1)
            return node.output[0], width
        reached.extend(part for part in node.input if part not in reached)
    raise ValueError("the graph has no layer normalisation before the pooling")


def read_projections(path: Path) -> dict[Role, FloatArray]:
    """Reads the projections that a stage of kind `late_interaction` wrote.

    Returns:
        For the query and the document side float32 [width, k].
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = f"is not a readable file of projections: {error}"
        raise PairError.at(path, reason, "bad_projections") from error
    roles: tuple[Role, Role] = ("query", "document")
    shapes = [tensors[role].shape for role in roles if role in tensors]
    if len(shapes) != len(roles) or any(len(shape) != 2 for shape in shapes):
        reason = "must have the matrices query and document: use the file of a late_interaction "
        reason += "stage"
        raise PairError.at(path, reason, "bad_projections")
    if shapes[0][1] != shapes[1][1]:
        reason = f"projects queries to {shapes[0][1]} and documents to {shapes[1][1]} dimensions"
        raise PairError.at(path, reason, "bad_projections")
    return {role: tensors[role].astype(np.float32) for role in roles}


def rotations(width: int) -> dict[Role, FloatArray]:
    """Returns projections that nothing has trained: the states, rotated at random.

    Rotated dimensions have equal variance, which the codecs with 1 and 2 bits assume. Similarities
    stay as they are. The rotation is always the same.

    Returns:
        For the query and the document side the same matrix, float32 [width, width].
    """
    normal = np.random.default_rng(0).normal(size=(width, width))
    rotation = np.linalg.qr(normal).Q.astype(np.float32)
    return {"query": rotation, "document": rotation}


def export_tokens(
    pair: Pair,
    projections: Path | None,
    out: Path,
    *,
    weight: float = 1.0,
    pooling: int = 2,
    codec: Codec = "2bit",
) -> Path:
    """Writes a copy of a pair whose graphs also have token vectors.

    Args:
        pair: A pair of two ONNX graphs.
        projections: The file that a stage of kind `late_interaction` wrote; None for `rotations`.
        out: New folder, or one of an earlier call, which is replaced.
        weight: Weight of late interaction in a search with the pair.
        pooling: Tokens of a document per vector that an index stores.
        codec: How an index stores a vector.

    Returns:
        The TOML file of the written pair. Its embedding space is the same: it can be used with
        all indexes of the pair.

    Raises:
        PairError: If a side is not a graph of this package, or the projections do not fit.
        CareError: If the sentence vectors of a written graph differ.
    """
    matrices = (
        read_projections(projections) if projections else rotations(pair.query.native_dimension)
    )
    checksum = hashlib.sha256(b"".join(matrices[role].tobytes() for role in sorted(matrices)))
    # Absolute, as paths in a spec are relative to the folder of its pair.
    with new_folder(out.resolve(), replace=True) as folder:
        query, document = (
            _export_side(spec, pair.folder, matrices[spec.role], folder)
            for spec in (pair.query, pair.document)
        )
        late_interaction = LateInteraction(
            space=f"{pair.embedding_space}-tokens-{checksum.hexdigest()[:_DIGITS]}",
            dimension=matrices["query"].shape[1],
            weight=weight,
            pooling=pooling,
            codec=codec,
        )
        sides = {"query": query, "document": document, "late_interaction": late_interaction}
        write_pair(pair.model_copy(update=sides), folder / PAIR)
    return out / PAIR


def _export_side(
    spec: EncoderSpec, base: Path, projection: FloatArray, folder: Path
) -> EncoderSpec:
    original = OnnxEncoder(spec, base, available_cpus())
    model = onnx.load(base / spec.weights)
    # They may hold the checksum of a second file, which the copy may not need.
    del model.metadata_props[:]
    try:
        model = add_token_output(model, projection)
    except ValueError as error:
        reason = f"cannot compute token vectors with these projections: {error}"
        raise PairError.at(base / spec.weights, reason, "unsupported_graph") from error
    weights = folder / f"{spec.role}.onnx"
    save(model, weights)
    shutil.copyfile(base / spec.tokenizer, folder / TOKENIZER)
    written = describe(spec.model_dump(), weights)
    texts = read_calibration(None)[:_COMPARED]
    expected = original.encode(texts).vectors
    found = OnnxEncoder(written, folder, available_cpus()).encode(texts).vectors
    if not np.array_equal(found, expected):
        message = f"the {spec.role} graph with token vectors computes other sentence vectors"
        raise CareError(message, code="other_vectors", role=spec.role)
    return written
