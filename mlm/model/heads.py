"""The heads on top of the encoder.

- the masked-LM head computes the M masked positions only, because the vocabulary makes it the widest layer
- its output matrix is the token embedding table (tied) or separate; a bias over the vocabulary is added
- the classifier's layers are those of the stock class that `ModelConfig.pooling` selects: ModernBERT's
  (dense, non-linearity, norm), or a dense layer with BERT's tanh, DistilBERT's relu or ELECTRA's gelu

Sizes: B batch, S sequence, M masked positions a row, D hidden, V vocabulary, C classes (1 for a score).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.model.encoder import ACTIVATIONS, Activation, Encoder, build_norm, init_weights

NON_LINEARITIES: dict[str, Activation] = {"cls_tanh": torch.tanh, "cls_relu": F.relu, "cls_gelu": F.gelu}
"""Non-linearity of a pooler without norm, by `ModelConfig.pooling`."""
UNUSED_ID_BIAS = -1e4
"""Output bias of ids without a token: its exponential is 0, and it is finite in every float type."""


class MaskedLMHead(nn.Module):
    """Transform, then compare with every token's vector."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size, "ModelConfig.resolve() comes before building a model"
        self.activation = ACTIVATIONS[config.activation]
        self.dense: nn.Module | None = None
        if config.head_transform:
            self.dense = nn.Linear(config.hidden_size, config.output_width, bias=config.head_bias)
            self.norm = build_norm(config, config.output_width)
        # nn.Embedding, not nn.Linear: one vector per token, which optimizers treat like the token table
        tied = config.tie_word_embeddings
        self.output = None if tied else nn.Embedding(config.vocab_size, config.output_width)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, token_table: Tensor) -> Tensor:
        """Return logits (..., V) for `hidden` (..., D), given the embedding table of the tokens (V, E)."""
        if self.dense is not None:
            hidden = self.norm(self.activation(self.dense(hidden)))
        return F.linear(hidden, token_table if self.output is None else self.output.weight, self.bias)


class MaskedLM(nn.Module):
    """Encoder and masked-LM head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = MaskedLMHead(config)
        init_weights(self, config.initializer_range)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, (B, M, V) at the masked positions (B, M), indices into the row, or (B, S, V).

        The other arguments as in `Encoder.forward`.
        """
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, masked_positions)
        return self.head(hidden, self.encoder.embeddings.token.weight)


def pool(hidden: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """Return (B, D), one vector for each text, as a value of `ModelConfig.pooling` says.

    `hidden` is the encoder's output (B, S, D), or (B, 1, D) of the first tokens if pooling uses no other. 0
    in the attention mask (B, S) is padding.
    """
    if how != "mean":
        return hidden[:, 0]
    if attention_mask is None:
        return hidden.mean(dim=1)
    real = (attention_mask != 0)[..., None]  # (B, S, 1)
    # where, not a product: padding may be infinite
    return hidden.where(real, 0.0).sum(dim=1) / real.sum(dim=1).clamp(min=1)


class Pooler(nn.Module):
    """One vector for a text: that of its first token or the mean, transformed."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.pooling, "ModelConfig fixes it"
        self.pooling: str = config.pooling
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.head_bias)
        self.norm = None if self.pooling in NON_LINEARITIES else build_norm(config)
        self.activation = NON_LINEARITIES.get(self.pooling, ACTIVATIONS[config.activation])

    def forward(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return (B, D) for `hidden` (B, S, D) and the 0/1 `attention_mask` (B, S); None: no padding."""
        pooled = self.activation(self.dense(pool(hidden, attention_mask, self.pooling)))
        return pooled if self.norm is None else self.norm(pooled)


class SequenceClassifier(nn.Module):
    """Encoder, pooler and classifier: logits of classes, or a score."""

    def __init__(self, config: ModelConfig, classifier_config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        self.classifier_config = classifier_config
        self.encoder = Encoder(config)
        self.pooler = Pooler(config)
        self.dropout = nn.Dropout(classifier_config.dropout)
        self.classifier = nn.Linear(config.hidden_size, len(classifier_config.labels))
        init_weights(self, config.initializer_range)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return (B, C), with a text or a pair of texts a row; arguments as in `Encoder.forward`."""
        selected = None if self.pooler.pooling == "mean" else torch.zeros_like(input_ids[:, :1])
        hidden = self.encoder(input_ids, attention_mask, token_type_ids, selected)
        return self.classifier(self.dropout(self.pooler(hidden, attention_mask)))


@torch.no_grad()
def rule_out_unused_ids(model: MaskedLM, num_tokens: int) -> None:
    """Set the output bias of the ids from `num_tokens` on, which only pad the tables, to UNUSED_ID_BIAS.

    Their probability and gradient are then 0. Ids ruled out for a smaller vocabulary start at 0 again.
    """
    bias = model.head.bias
    bias[bias < UNUSED_ID_BIAS / 2] = 0.0
    bias[num_tokens:] = UNUSED_ID_BIAS
