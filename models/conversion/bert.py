"""The source's weights as a BERT model."""

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import BertConfig, BertModel

from models.conversion.source import Source

# Prefixes of a layer's parameters, in BertModel and in the source.
_LINEAR = {
    "attention.self.query": "q",
    "attention.self.key": "k",
    "attention.self.value": "v",
    "attention.output.dense": "ao",
    "intermediate.dense": "fi",
    "output.dense": "fo",
}
_LAYER_NORM = {"attention.output.LayerNorm": "aln", "output.LayerNorm": "oln"}


def build_bert(source: Source, kept: NDArray[np.int64]) -> BertModel:
    """Builds the float32 model over a part of the vocabulary.

    Args:
        source: The weights.
        kept: int64 [n], for each id of the new vocabulary its id in the source.

    Returns:
        The model, without a pooler, in evaluation mode.
    """
    config = BertConfig(
        vocab_size=len(kept),
        hidden_size=source.hidden,
        num_hidden_layers=source.layers,
        num_attention_heads=source.heads,
        intermediate_size=source.intermediate,
        max_position_embeddings=source.positions,
        type_vocab_size=source.token_types,
        layer_norm_eps=source.layer_norm_eps,
        pad_token_id=kept.tolist().index(source.controls[1]),
    )
    model = BertModel(config, add_pooling_layer=False)
    # The fused attention of ONNX Runtime is found in the eager form of the graph only.
    model.set_attn_implementation("eager")
    arrays = _parameters(source, kept)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    model.eval()
    return model


def _parameters(source: Source, kept: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
    hidden = source.hidden
    parameters = {
        "embeddings.word_embeddings.weight": source.matrix("emb.word", hidden, kept),
        "embeddings.position_embeddings.weight": source.vector("emb.pos").reshape(-1, hidden),
        "embeddings.token_type_embeddings.weight": source.vector("emb.type").reshape(-1, hidden),
        "embeddings.LayerNorm.weight": source.vector("emb.ln.w"),
        "embeddings.LayerNorm.bias": source.vector("emb.ln.b"),
    }
    for layer in range(source.layers):
        target, origin = f"encoder.layer.{layer}", f"l{layer}"
        for module, name in _LINEAR.items():
            columns = source.intermediate if name == "fo" else hidden
            weight = source.matrix(f"{origin}.{name}.w", columns)
            parameters[f"{target}.{module}.weight"] = weight
            parameters[f"{target}.{module}.bias"] = source.vector(f"{origin}.{name}.b")
        for module, name in _LAYER_NORM.items():
            parameters[f"{target}.{module}.weight"] = source.vector(f"{origin}.{name}.w")
            parameters[f"{target}.{module}.bias"] = source.vector(f"{origin}.{name}.b")
    return parameters
