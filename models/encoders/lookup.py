"""A model of transformers that looks token vectors up in a table: an encoder without layers.

The vector of a text is the mean of the states hᵢ of its tokens tᵢ,

    hᵢ = E[tᵢ] + U · gelu(L[tᵢ₋₁] + M[tᵢ] + R[tᵢ₊₁]) + b,

with a table of token vectors E and three narrow tables L, M and R, so that a token's state depends
on its two neighbours. Without L, M, R, U and b (`context` 0) the vector is the mean of token
vectors, weighted by their norms. Importing the module registers the model type in transformers.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

MODEL_TYPE = "care-lookup"


class LookupConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of a `LookupModel`; `context` is the width of L, M and R, 0 for none."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 1,
        context: int = 0,
        initializer_range: float = 0.02,
        **options: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.context = context
        self.initializer_range = initializer_range
        super().__init__(**options)


class LookupModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Token states from tables; see the module."""

    config_class = LookupConfig
    base_model_prefix = "lookup"

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.context:
            self.neighbours = nn.Embedding(config.vocab_size, 3 * config.context)
            self.map = nn.Linear(config.context, config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, nn.Linear):
            # Training starts from the mean of token vectors.
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.tokens = value

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        """Returns states, [n, length, width], of int64 [n, length] ids and mask."""
        states = self.tokens(input_ids)
        if self.config.context:
            # Padding is no neighbour, so that a vector does not depend on its batch.
            found = self.neighbours(input_ids) * attention_mask[:, :, None].to(states.dtype)
            left, own, right = found.split(self.config.context, dim=2)
            before = functional.pad(left[:, :-1], (0, 0, 1, 0))
            after = functional.pad(right[:, 1:], (0, 0, 0, 1))
            states = states + self.map(functional.gelu(before + own + after))
        return BaseModelOutput(last_hidden_state=states)


AutoConfig.register(MODEL_TYPE, LookupConfig)
AutoModel.register(LookupConfig, LookupModel)
