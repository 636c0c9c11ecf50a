"""RetroMAE (arXiv 2205.12035): pretraining of a text's vector by rebuilding the text from it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer

from core.errors import TrainingError
from models.training.batches import Batch, Item
from models.training.encoder import Encoder, Tokens
from models.training.recipe import RetroMae

_UNSCORED = -100


class RetroMaeObjective(nn.Module):
    """Masked language modelling by the encoder, and rebuilding by a decoder of one layer.

    The decoder reads the vector of the masked text in place of its first token; each position
    sees that vector and a random part of the other tokens, never itself (enhanced decoding).
    Head and decoder are left behind after pretraining.

    Args:
        encoder: The encoder; it must have no projection, whose width is another.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        if encoder.projection is not None:
            raise TrainingError("retromae: an encoder with a projection cannot be pretrained")
        config = encoder.model.config
        width, heads = config.hidden_size, config.num_attention_heads
        self.encoder = encoder
        self.positions = nn.Embedding(encoder.side.start.max_length, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.after_attention = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.after_feed_forward = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Returns the loss of a batch of `RetroMaeCollator`."""
        mask = batch["mask"]
        states = self.encoder.states(batch["masked_ids"], mask)
        encoded = self._loss(states, batch["masked_targets"])
        vectors = self.encoder.pool(states, mask)
        decoded = self._loss(
            self._decode(vectors, batch["ids"], batch["visible"]), batch["targets"]
        )
        return {"loss": encoded + decoded, "encoder": encoded, "decoder": decoded}

    def _decode(self, vectors: Tensor, ids: Tensor, visible: Tensor) -> Tensor:
        """Returns states [n, length, width] of the decoder.

        Args:
            vectors: [n, width] of the masked texts.
            ids: int64 [n, length] of the whole texts.
            visible: bool [n, length, length], which positions each position sees.
        """
        places = self.positions.weight[None, : ids.shape[1]]
        tokens = self.encoder.model.get_input_embeddings()(ids) + places
        tokens = torch.cat([vectors[:, None].to(tokens.dtype), tokens[:, 1:]], dim=1)
        queries = vectors[:, None].to(tokens.dtype) + places
        hidden = ~visible.repeat_interleave(self.attention.num_heads, dim=0)
        attended, _ = self.attention(queries, tokens, tokens, attn_mask=hidden, need_weights=False)
        states = self.after_attention(queries + attended)
        decoded: Tensor = self.after_feed_forward(states + self.feed_forward(states))
        return decoded

    def _loss(self, states: Tensor, targets: Tensor) -> Tensor:
        scored = targets != _UNSCORED
        table = self.encoder.model.get_input_embeddings().weight
        logits = functional.linear(self.head(states[scored].to(table.dtype)), table, self.head_bias)
        return functional.cross_entropy(logits.float(), targets[scored])


class RetroMaeCollator:
    """Tensors of a batch of texts, masked by seed, epoch and first text of the batch.

    Args:
        tokens: The texts.
        encoder: Its tokenizer says which tokens are special and which stands for a mask; where
            there is none, the unknown token does.
        stage: The parts that are masked.
        seed: Seed of the masks.

    Raises:
        TrainingError: If the tokenizer has neither token.
    """

    def __init__(self, tokens: Tokens, encoder: Encoder, stage: RetroMae, seed: int) -> None:
        tokenizer = AutoTokenizer.from_pretrained(encoder.side.folder, trust_remote_code=False)
        mask = tokenizer.mask_token_id
        mask = tokenizer.unk_token_id if mask is None else mask
        if mask is None:
            raise TrainingError(f"{encoder.side.folder}: retromae needs a token for masks")
        self._mask = mask
        self._special = np.array(tokenizer.all_special_ids)
        self._tokens, self._stage, self._seed = tokens, stage, seed

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns the batch of these (epoch, text)."""
        ids, mask = self._tokens.padded([text for _, text in items])
        rows, length = ids.shape
        random = np.random.default_rng([self._seed, *items[0]])
        text = mask.numpy().astype(bool) & ~np.isin(ids.numpy(), self._special)
        masked = text & (random.random((rows, length)) < self._stage.encoder_mask)
        # A batch without a masked token has no loss.
        for row in np.flatnonzero(text.any(axis=1) & ~masked.any(axis=1)):
            masked[row, random.choice(np.flatnonzero(text[row]))] = True
        visible = random.random((rows, length, length)) >= self._stage.decoder_mask
        visible &= mask.numpy().astype(bool)[:, None, :]
        visible[:, np.arange(length), np.arange(length)] = False
        visible[:, :, 0] = True
        targets = torch.from_numpy(np.where(text, ids.numpy(), _UNSCORED))
        return {
            "ids": ids,
            "mask": mask,
            "masked_ids": ids.masked_fill(torch.from_numpy(masked), self._mask),
            "masked_targets": targets.masked_fill(torch.from_numpy(~masked), _UNSCORED),
            "targets": targets,
            "visible": torch.from_numpy(visible),
        }
