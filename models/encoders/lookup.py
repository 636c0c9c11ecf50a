"""A model of transformers that looks token vectors up in a table: an encoder without layers.

The vector of a text is the mean of the vectors of its tokens, which are weighted by their norms.
Importing the module registers the model type in transformers.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

MODEL_TYPE = "care-lookup"


class LookupConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Configuration of a `LookupModel`."""

    model_type = MODEL_TYPE

    def __init__(
        self,
        vocab_size: int = 1,
        hidden_size: int = 1,
        initializer_range: float = 0.02,
        **options: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.initializer_range = initializer_range
        super().__init__(**options)


class LookupModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Token states from a table; see the module."""

    config_class = LookupConfig
    base_model_prefix = "lookup"

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        assert isinstance(value, nn.Embedding)
        self.tokens = value

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> BaseModelOutput:
        """Returns states, [n, length, width], of int64 [n, length] ids and mask."""
        return BaseModelOutput(last_hidden_state=self.tokens(input_ids))


AutoConfig.register(MODEL_TYPE, LookupConfig)
AutoModel.register(LookupConfig, LookupModel)
