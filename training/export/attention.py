"""Forms of attention and of rotary positions that run fast and exactly in an exported graph.

transformers lets a model compute attention by a registered function. The one of this module
computes what `eager` does, and is exported as `MultiHeadAttention` of ONNX Runtime, whose kernels
on GPUs do not store the scores of all heads. ONNX Runtime's optimizer does the same for BERT, but
recognises no attention with rotary positions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

_NAME = "onnx_multi_head"
# Kinds of rotary positions whose frequencies depend on the length of the batch.
_BY_LENGTH = ("dynamic", "longrope")


class _MultiHead(torch.autograd.Function):
    """Scaled dot-product attention with an additive mask."""

    @staticmethod
    def forward(
        _: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        heads: int,
        scale: float,
    ) -> torch.Tensor:
        """Returns float32 [n, length, width].

        Args:
            query: float32 [n, length, width].
            key: float32 [n, heads, length, width / heads].
            value: As `key`.
            mask: float32 [n, 1, length, length], added to the scores.
            scale: Factor of the scores.
        """
        split = query.reshape(*query.shape[:2], heads, -1).transpose(1, 2)
        found = torch.nn.functional.scaled_dot_product_attention(
            split, key, value, attn_mask=mask, scale=scale
        )
        return found.transpose(1, 2).flatten(2)

    @staticmethod
    def symbolic(
        g: Any, query: Any, key: Any, value: Any, mask: Any, heads: int, scale: float
    ) -> Any:
        """Adds the operator to a graph; two optional inputs, a bias and a mask, are empty."""
        empty = g.op("prim::Constant")
        empty.setType(torch._C.OptionalType.ofTensor())
        inputs = (query, key, value, empty, empty, mask)
        found = g.op("com.microsoft::MultiHeadAttention", *inputs, num_heads_i=heads, scale_f=scale)
        found.setType(query.type())
        return found


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    heads: int = module.config.num_attention_heads
    flat = query.transpose(1, 2).flatten(2)
    apply: Any = _MultiHead.apply
    return apply(flat, key, value, attention_mask, heads, scaling), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, eager_mask)


class _RotaryTable(torch.nn.Module):
    """Cosine and sine of rotary positions, looked up instead of computed.

    In half precision the angle of position 300 is off by up to 0.1, its cosine and sine only by
    0.0002.
    """

    def __init__(self, rotary: torch.nn.Module, positions: int) -> None:
        super().__init__()
        cos, sin = rotary(torch.zeros(1), torch.arange(positions)[None])
        self.cos = torch.nn.Buffer(cos[0])
        self.sin = torch.nn.Buffer(sin[0])

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        embed = torch.nn.functional.embedding
        cos, sin = embed(position_ids, self.cos), embed(position_ids, self.sin)
        return cos.to(x.dtype), sin.to(x.dtype)


@contextmanager
def rotary_table(model: PreTrainedModel, max_length: int) -> Iterator[None]:
    """Exports rotary positions of a model in the block, if any, as tables of `max_length` rows."""
    rotary = getattr(model, "rotary_emb", None)
    if rotary is None or getattr(rotary, "rope_type", "default") in _BY_LENGTH:
        yield
        return
    model.rotary_emb = _RotaryTable(rotary, max_length)
    try:
        yield
    finally:
        model.rotary_emb = rotary


@contextmanager
def one_operator(model: PreTrainedModel) -> Iterator[None]:
    """Exports the attention of a model in the block as one operator per layer."""
    before = model.config._attn_implementation
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
