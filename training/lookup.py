"""Making a lookup encoder (`models.encoders.lookup`) from another encoder."""

from pathlib import Path

import numpy as np
import torch

from core.types import FloatArray
from models.encoders.lookup import LookupConfig, LookupModel
from training.encoder import (
    Encoder,
    EncoderCheckpoint,
    Tokens,
    copy_tokenizer,
    encode,
    standalone_tokenizer,
)
from training.errors import TrainingError
from training.schema import Lookup

# Tokens that are encoded at a time for `outputs`.
_BATCH = 256


def write_lookup(source: EncoderCheckpoint, lookup: Lookup, folder: Path) -> None:
    """Writes a lookup encoder, made from another encoder, as a checkpoint with the same tokenizer.

    Raises:
        TrainingError: If `embeddings` have other dimensions than the encoder's vectors.
    """
    encoder = Encoder(source, trainable=False)
    torch.manual_seed(0)
    model = LookupModel(
        LookupConfig(
            vocab_size=encoder.model.get_input_embeddings().num_embeddings,
            hidden_size=source.dimension,
            context=lookup.context,
        )
    )
    if lookup.table == "outputs":
        model.tokens.weight.data = torch.from_numpy(token_vectors(encoder, lookup.prompt))
    elif lookup.table == "embeddings":
        embeddings = encoder.model.get_input_embeddings().weight.data.float()
        if embeddings.shape[1] != source.dimension:
            reason = f"the embeddings have {embeddings.shape[1]} dimensions and the vectors "
            reason += f"{source.dimension}: use table: outputs"
            raise TrainingError.at("lookup.table", reason, "dimension_mismatch")
        model.tokens.weight.data = embeddings.clone()
    model.save_pretrained(folder)
    copy_tokenizer(source.folder, folder)


def token_vectors(encoder: Encoder, prompt: str) -> FloatArray:
    """Returns the vector of each token alone, after a prompt, float32 [tokens, dimension].

    Special tokens that end each text follow the token.
    """
    head = standalone_tokenizer(encoder.checkpoint).encode(prompt)
    special = head.special_tokens_mask
    first = len(special)
    while first and special[first - 1]:
        first -= 1
    count = encoder.model.get_input_embeddings().num_embeddings
    ids = np.empty((count, len(special) + 1), np.int32)
    ids[:, :first], ids[:, first + 1 :] = head.ids[:first], head.ids[first:]
    ids[:, first] = np.arange(count)
    tokens = Tokens(ids.reshape(-1), np.arange(count + 1) * ids.shape[1])
    return encode(encoder, tokens, batch=_BATCH)
