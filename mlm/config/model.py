"""The encoder's shape and switches: all that decides what is computed, nothing about how it is trained.

- names are Hugging Face's where its families agree; `mlm/hub/families.py` maps them to each family's spelling
- the defaults are the small modern encoder of `configs/pretrain/default.yaml`
- `None` means "decided by something else", and each docstring says by what
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from mlm.config.errors import InputError, require, require_finite

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to a multiple of this: matrix units like it, and nothing predicts the rest."""


@dataclass
class ModelConfig:
    """Shape and switches of the encoder."""

    vocab_size: int | None = None
    """Embedding rows; null: the tokenizer's size, rounded up to 64s."""
    hidden_size: int = 256
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Number of encoder layers."""
    num_attention_heads: int = 4
    """Attention heads; must divide hidden_size."""
    intermediate_size: int = 704
    """Feed-forward width; geglu has two matrices of this width."""
    max_position_embeddings: int | None = None
    """Longest row in tokens the model may see; null: data.seq_len."""
    norm_position: Literal["pre", "post"] = "pre"
    """Normalise before each sublayer, or after each residual sum."""
    norm_eps: float = 1e-5
    """Added to the variance in every LayerNorm."""
    norm_bias: bool = False
    """LayerNorm has a shift as well as a scale."""
    position_embedding: Literal["rotary", "learned"] = "rotary"
    """Rotate queries and keys, or add a learned table."""
    rotary_theta: float = 10000.0
    """Base of the rotary wavelengths in layers with full attention."""
    activation: Literal["gelu", "geglu"] = "geglu"
    """Feed-forward non-linearity; geglu is gated: gelu(a) * b."""
    attention_bias: bool = False
    """The attention projections have biases."""
    mlp_bias: bool = False
    """The feed-forward projections have biases."""
    type_vocab_size: int = 0
    """Rows of the segment (token type) table; 0: none."""
    embedding_dropout: float = 0.0
    """Dropout on the embeddings, in [0, 1)."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights, in [0, 1)."""
    hidden_dropout: float = 0.0
    """Dropout on each sublayer's output, in [0, 1)."""
    first_attention_norm: bool = False
    """Pre-norm only: normalise before the first attention as well."""
    head_bias: bool = False
    """The dense layer of the masked-LM head has a bias (its output has one always)."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights, truncated at two of them."""

    def __post_init__(self) -> None:
        require_finite("model", self)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            value = getattr(self, name)
            require(value > 0, f"model.{name}", value, "must be at least 1")
        for name in ("vocab_size", "max_position_embeddings"):
            value = getattr(self, name)
            require(value is None or value > 0, f"model.{name}", value, "must be at least 1, or null")
        types = self.type_vocab_size
        require(types >= 0, "model.type_vocab_size", types, "must be at least 0")
        for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"model.{name}", value, "must lie in [0, 1)")
        for name in ("norm_eps", "initializer_range", "rotary_theta"):
            require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "must be above 0")
        self._check_heads()

    def _check_heads(self) -> None:
        hidden, heads = self.hidden_size, self.num_attention_heads
        if hidden % heads:
            below = hidden // heads * heads
            fits = " or ".join(str(size) for size in (below, below + heads) if size)
            raise InputError(
                f"model.hidden_size={hidden} must be a multiple of model.num_attention_heads={heads}; "
                f"try {fits}"
            )
        if self.position_embedding == "rotary" and (hidden // heads) % 2:
            raise InputError(
                f"model.hidden_size={hidden} with model.num_attention_heads={heads} gives heads of odd width "
                f"{hidden // heads}; rotary positions turn pairs, so make it even"
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate matrix beside the value matrix."""
        return self.activation == "geglu"

    def resolve(self, tokenizer_size: int, seq_len: int) -> ModelConfig:
        """Return a copy whose `vocab_size` and `max_position_embeddings` are numbers.

        Raises:
            InputError: the vocabulary or the rows do not fit into numbers that the user fixed.
        """
        resolved = replace(
            self,
            vocab_size=self.vocab_size or -(-tokenizer_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            max_position_embeddings=self.max_position_embeddings or seq_len,
        )
        resolved.check_fit(tokenizer_size, seq_len)
        return resolved

    def check_fit(self, tokenizer_size: int, seq_len: int) -> None:
        """Check that a vocabulary and rows of `seq_len` tokens fit into the tables.

        Raises:
            InputError: names both sizes.
        """
        if self.vocab_size is not None and self.vocab_size < tokenizer_size:
            raise InputError(
                f"model.vocab_size={self.vocab_size} is smaller than the tokenizer, which has "
                f"{tokenizer_size} entries"
            )
        longest = self.max_position_embeddings
        if longest is not None and seq_len > longest:
            raise InputError(
                f"data.seq_len={seq_len} is longer than model.max_position_embeddings={longest}; "
                f"set data.seq_len to at most {longest}"
            )


@dataclass(frozen=True)
class ClassifierConfig:
    """The head that sorts texts into classes or gives them a score; its layers follow from the encoder's."""

    labels: tuple[str, ...]
    """Names of the classes, in the order of their ids; for a score its one name."""
    label_type: Literal["classification", "regression"] = "classification"
    """Whether the outputs are logits of classes, or one score."""
    pooling: Literal["cls", "mean"] = "cls"
    """A text is the vector of its first token, or the mean over its tokens."""
    dropout: float = 0.1
    """Dropout before the last layer, in [0, 1)."""

    def __post_init__(self) -> None:
        labels, found = list(self.labels), len(self.labels)
        require(len(set(labels)) == found > 0, "labels", labels, "must be distinct names")
        require(
            self.label_type == "classification" or found == 1, "labels", labels, "must be one for a score"
        )
        require(0 <= self.dropout < 1, "classifier_dropout", self.dropout, "must lie in [0, 1)")
