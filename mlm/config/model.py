"""The encoder's shape and switches: all that decides what is computed, nothing about how it is trained.

- names are Hugging Face's where its families agree; `mlm/hub/families.py` maps them to each family's spelling
- the defaults are the small modern encoder of `configs/pretrain/default.yaml`
- `None` means "decided by something else", and each docstring says by what
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, get_args

from mlm.config.errors import InputError, require, require_finite

LabelType = Literal["classification", "regression", "multilabel"]
"""Whether a text has one of several classes, a number, or any number of classes."""
Pooling = Literal["cls", "mean", "cls_tanh", "cls_relu", "cls_gelu"]
"""What stands for a text: its first token or the mean over its tokens, to which a classifier applies
ModernBERT's transform; or its first token, with the dense layer of BERT, DistilBERT or ELECTRA."""

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to a multiple of this: matrix units like it, and nothing predicts the rest."""

_LEAST = {
    "vocab_size": (1, True),
    "hidden_size": (1, False),
    "num_hidden_layers": (1, False),
    "num_attention_heads": (1, False),
    "intermediate_size": (1, False),
    "max_position_embeddings": (1, True),
    "embedding_size": (1, True),
    "position_offset": (0, False),
    "global_attn_every_n_layers": (1, False),
    "local_attention": (1, False),
    "type_vocab_size": (0, False),
}
"""Smallest value of each whole number, and whether it may be null."""


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
    intermediate_size: int = 672
    """Feed-forward width; three matrices of geglu or swiglu at 8/3 of hidden_size equal two at 4."""
    max_position_embeddings: int | None = None
    """Longest row in tokens the model may see; null: data.seq_len."""
    embedding_size: int | None = None
    """Width of the embedding tables, then projected; null: hidden_size."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of norm; rmsnorm does not subtract the mean."""
    norm_position: Literal["pre", "post"] = "pre"
    """Normalise before each sublayer, or after each residual sum."""
    norm_eps: float = 1e-5
    """Added to the variance in every norm."""
    norm_bias: bool = False
    """LayerNorm has a shift as well as a scale."""
    embedding_norm: bool = True
    """Normalise the embeddings."""
    final_norm: bool | None = None
    """Normalise the last layer's output; null: if norm_position is pre."""
    position_embedding: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    """Rotation, or a table that is added."""
    position_offset: int = 0
    """Row of the table that the first token takes (2 in RoBERTa)."""
    rotary_theta: float = 10000.0
    """Base of the rotary wavelengths in layers with full attention."""
    local_rotary_theta: float = 10000.0
    """The same in layers with local attention."""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """See both sides, or nothing that comes later."""
    global_attn_every_n_layers: int = 1
    """Full attention in every n-th layer from the first on, local in the others."""
    local_attention: int = 128
    """Window of local attention, half of it on each side."""
    activation: Literal["relu", "gelu", "geglu", "swiglu"] = "geglu"
    """Feed-forward non-linearity; the last two are gated."""
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
    head_transform: bool = True
    """The masked-LM head begins with a dense layer, non-linearity and norm."""
    head_bias: bool = False
    """That dense layer has a bias (the output has one always)."""
    tie_word_embeddings: bool = True
    """The output matrix is the token table; false: one of its own."""
    pooling: Pooling | None = None
    """A text's vector: first token, mean, or layer on the first; null: cls_tanh if norm_position is post."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights, truncated at two of them."""

    def __post_init__(self) -> None:
        require_finite("model", self)
        self._check_ranges()
        self._check_heads()
        self._check_combinations()
        # One spelling for one model, so that two configurations can be compared.
        if self.embedding_size == self.hidden_size:
            self.embedding_size = None
        if self.final_norm == (self.norm_position == "pre"):
            self.final_norm = None
        if self.pooling is None:
            self.pooling = "cls" if self.norm_position == "pre" else "cls_tanh"
        known = get_args(Pooling)
        require(self.pooling in known, "model.pooling", self.pooling, f"must be one of {', '.join(known)}")

    def _check_ranges(self) -> None:
        for name, (least, nullable) in _LEAST.items():
            value = getattr(self, name)
            fits = nullable if value is None else value >= least
            require(fits, f"model.{name}", value, f"must be at least {least}{', or null' * nullable}")
        for name in ("embedding_dropout", "attention_dropout", "hidden_dropout"):
            value = getattr(self, name)
            require(0 <= value < 1, f"model.{name}", value, "must lie in [0, 1)")
        for name in ("norm_eps", "initializer_range", "rotary_theta", "local_rotary_theta"):
            require(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "must be above 0")

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

    def _check_combinations(self) -> None:
        if self.norm == "rmsnorm" and self.norm_bias:
            raise InputError("model.norm_bias=True needs model.norm=layernorm: RMSNorm has no shift")
        if self.position_embedding == "sinusoidal" and self.embedding_width % 2:
            raise InputError(
                f"model.position_embedding=sinusoidal pairs sines with cosines, so the embeddings' width "
                f"{self.embedding_width} must be even"
            )
        if self.tie_word_embeddings and not self.head_transform and self.embedding_width != self.hidden_size:
            raise InputError(
                f"model.embedding_size={self.embedding_size} with model.tie_word_embeddings=True needs "
                f"model.head_transform=True, which leads back from model.hidden_size={self.hidden_size}"
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate matrix beside the value matrix."""
        return self.activation in ("geglu", "swiglu")

    @property
    def embedding_width(self) -> int:
        """Width of the embedding tables."""
        return self.embedding_size or self.hidden_size

    @property
    def output_width(self) -> int:
        """Width of what is compared with the output matrix."""
        return self.embedding_width if self.head_transform else self.hidden_size

    @property
    def has_final_norm(self) -> bool:
        """Whether the output of the last layer is normalised once more."""
        return self.norm_position == "pre" if self.final_norm is None else self.final_norm

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions, 0 without one."""
        if self.position_embedding not in ("learned", "sinusoidal"):
            return 0
        if self.max_position_embeddings is None:
            raise InputError("model.max_position_embeddings is null; set it to the longest row in tokens")
        return self.max_position_embeddings + self.position_offset

    def has_attention_norm(self, layer: int) -> bool:
        """Whether layer number `layer`, counted from 0, normalises for its attention."""
        return layer > 0 or self.first_attention_norm or self.norm_position == "post"

    def is_local(self, layer: int) -> bool:
        """Whether tokens see only their neighbours in layer number `layer`, counted from 0."""
        return layer % self.global_attn_every_n_layers > 0

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
    label_type: LabelType = "classification"
    """Whether the outputs are logits of classes, of which one holds or any number do, or one score."""
    dropout: float = 0.1
    """Dropout before the last layer, in [0, 1)."""
    text_pairs: bool | None = None
    """Whether it was trained on pairs of texts; None: the folder does not say."""

    def __post_init__(self) -> None:
        labels, found = list(self.labels), len(self.labels)
        require(len(set(labels)) == found > 0, "labels", labels, "must be distinct names")
        for label in labels:
            writable = not re.search("[\ud800-\udfff]", label)
            require(writable, "labels", [label], "has half a surrogate pair in it, which no file can hold")
        require(self.label_type != "regression" or found == 1, "labels", labels, "must be one for a score")
        require(0 <= self.dropout < 1, "classifier_dropout", self.dropout, "must lie in [0, 1)")

    def order_of(self, labels: tuple[str, ...]) -> list[int] | None:
        """Return the ids that these names have here; None: they are others.

        Capitals are looked past only where no name is lost by it: a model may tell Yes from yes.
        """
        own, wanted = list(self.labels), list(labels)
        if set(own) != set(wanted):
            own, wanted = ([label.lower() for label in names] for names in (own, wanted))
        ids = {label: number for number, label in enumerate(own)}
        same = ids.keys() == set(wanted) and len(ids) == len(own) == len(wanted)
        return [ids[label] for label in wanted] if same else None
