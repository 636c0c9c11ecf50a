"""RetroMAE (arXiv 2205.12035): pretraining by reconstructing a text from its vector."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer

from core.encoders import Role
from training.batches import Batch, Item
from training.encoder import Encoder, EncoderCheckpoint, Tokens
from training.errors import TrainingError
from training.objectives import Losses, Objective

_UNSCORED = -100


class RetroMaeObjective(Objective):
    """Masked language modelling by the encoder, and reconstruction by a one-layer decoder.

    In the decoder, the vector of the masked text replaces the first token. Each position attends
    to this vector and to a random subset of the other tokens, never to itself (enhanced
    decoding, section 3.3 of the paper). Head and decoder are discarded after pretraining.
    """

    def __init__(self, encoders: Mapping[Role, Encoder]) -> None:
        super().__init__(encoders, {})
        (encoder,) = encoders.values()
        if encoder.projection is not None:
            reason = "retromae does not support an encoder with a projection"
            raise TrainingError.at(encoder.checkpoint.folder, reason, "has_projection")
        config = encoder.model.config
        width, heads = config.hidden_size, config.num_attention_heads
        self.positions = nn.Embedding(encoder.checkpoint.init.max_length, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.after_attention = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.after_feed_forward = nn.LayerNorm(width)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, **batch: Tensor) -> Losses:
        """Returns the loss of a batch of `RetroMaeCollator`, and its encoder and decoder parts."""
        (encoder,) = self.trained.values()
        embeddings, mask = encoder.model.get_input_embeddings(), batch["mask"]
        states = encoder.states(batch["masked_ids"], mask)
        encoded = self._loss(states, batch["masked_targets"], embeddings.weight)
        vectors, tokens = encoder.pool(states, mask), embeddings(batch["ids"])
        states = self._decode(vectors, tokens, batch["visible"])
        decoded = self._loss(states, batch["targets"], embeddings.weight)
        return {"loss": encoded + decoded, "encoder": encoded, "decoder": decoded}

    def _decode(self, vectors: Tensor, tokens: Tensor, visible: Tensor) -> Tensor:
        """Returns the decoder's states, [n, length, width].

        Args:
            vectors: [n, width], of the masked texts.
            tokens: [n, length, width], embeddings of the unmasked texts.
            visible: bool [n, length, length], the positions that each position attends to.
        """
        positions = self.positions.weight[None, : tokens.shape[1]]
        tokens = tokens + positions
        tokens = torch.cat([vectors[:, None].to(tokens.dtype), tokens[:, 1:]], dim=1)
        queries = vectors[:, None].to(tokens.dtype) + positions
        hidden = ~visible.repeat_interleave(self.attention.num_heads, dim=0)
        attended, _ = self.attention(queries, tokens, tokens, attn_mask=hidden, need_weights=False)
        states = self.after_attention(queries + attended)
        decoded: Tensor = self.after_feed_forward(states + self.feed_forward(states))
        return decoded

    def _loss(self, states: Tensor, targets: Tensor, table: Tensor) -> Tensor:
        scored = targets != _UNSCORED
        logits = functional.linear(self.head(states[scored].to(table.dtype)), table, self.head_bias)
        return functional.cross_entropy(logits.float(), targets[scored])


class RetroMaeCollator:
    """Collates texts into a batch; masks depend on the seed, the epoch and the batch's first text.

    `masks` are the shares of tokens masked for the encoder and hidden from the decoder. A tokenizer
    without a mask token uses the unknown token.
    """

    def __init__(
        self, tokens: Tokens, checkpoint: EncoderCheckpoint, masks: tuple[float, float], seed: int
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False)
        mask = tokenizer.mask_token_id
        mask = tokenizer.unk_token_id if mask is None else mask
        if mask is None:
            reason = (
                "the tokenizer has neither a mask token nor an unknown token, which retromae needs"
            )
            raise TrainingError.at(checkpoint.folder, reason, "no_mask_token")
        self._mask = mask
        self._special = np.array(tokenizer.all_special_ids)
        self._encoder_mask, self._decoder_mask = masks
        self._tokens, self._seed = tokens, seed

    def __call__(self, items: Sequence[Item]) -> Batch:
        """Returns the batch of (epoch, text) items."""
        ids, mask = self._tokens.padded([text for _, text in items])
        rows, length = ids.shape
        random = np.random.default_rng([self._seed, *items[0]])
        text = mask.numpy().astype(bool) & ~np.isin(ids.numpy(), self._special)
        masked = text & (random.random((rows, length)) < self._encoder_mask)
        # Masks at least one token of each text: the loss of a batch without masks is undefined.
        for row in np.flatnonzero(text.any(axis=1) & ~masked.any(axis=1)):
            masked[row, random.choice(np.flatnonzero(text[row]))] = True
        visible = np.empty((rows, length, length), dtype=bool)
        for number in range(rows):
            visible[number] = random.random((length, length)) >= self._decoder_mask
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
