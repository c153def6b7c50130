"""The shape and switches of the encoder: what is computed, not how it is trained.

- names are Hugging Face's where its families agree; `mlm/hub/families.py` maps them to each family's spelling
- the defaults are the small modern encoder of `configs/pretrain/default.yaml`
- `None` means "decided by something else", and each docstring says by what
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from mlm.config.errors import InputError, require
from mlm.config.schema import AboveZero, BelowOne, NonNegative, Positive, schema

LabelType = Literal["classification", "regression", "multilabel"]
"""Whether a text has one of several classes, a number, or any number of classes."""
Pooling = Literal["cls", "mean", "cls_tanh", "cls_relu", "cls_gelu"]
"""The vector of a text: its first token or the mean over its tokens, to which a classifier applies
ModernBERT's transform; or its first token, with the dense layer of BERT, DistilBERT or ELECTRA."""

VOCAB_MULTIPLE = 64
"""Embedding rows are padded to a multiple of this: matrix units like it, and nothing predicts the rest."""


@schema("model.")
class ModelConfig:
    """Shape and switches of the encoder."""

    vocab_size: Positive | None = None
    """Embedding rows; null: the tokenizer's size, rounded up to 64s."""
    hidden_size: Positive = 256
    """Width of the residual stream."""
    num_hidden_layers: Positive = 4
    """Number of encoder layers."""
    num_attention_heads: Positive = 4
    """Attention heads; must divide hidden_size."""
    intermediate_size: Positive = 672
    """Feed-forward width; three matrices of geglu or swiglu at 8/3 of hidden_size equal two at 4."""
    max_position_embeddings: Positive | None = None
    """Longest row in tokens the model may see; null: data.seq_len."""
    embedding_size: Positive | None = None
    """Width of the embedding tables, then projected; null: hidden_size."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of norm; rmsnorm does not subtract the mean."""
    norm_position: Literal["pre", "post"] = "pre"
    """Normalise before each sublayer, or after each residual sum."""
    norm_eps: AboveZero = 1e-5
    """Added to the variance in every norm."""
    norm_bias: bool = False
    """LayerNorm has a shift as well as a scale."""
    embedding_norm: bool = True
    """Normalise the embeddings."""
    final_norm: bool | None = None
    """Normalise the last layer's output; null: if norm_position is pre."""
    position_embedding: Literal["rotary", "learned", "sinusoidal", "none"] = "rotary"
    """Rotation, or a table that is added."""
    position_offset: NonNegative = 0
    """Row of the table that the first token takes (2 in RoBERTa)."""
    rotary_theta: AboveZero = 10000.0
    """Base of the rotary wavelengths in layers with full attention."""
    local_rotary_theta: AboveZero = 10000.0
    """The same in layers with local attention."""
    attention: Literal["bidirectional", "causal"] = "bidirectional"
    """See both sides, or nothing that comes later."""
    global_attn_every_n_layers: Positive = 1
    """Full attention in every n-th layer from the first on, local in the others."""
    local_attention: Positive = 128
    """Window of local attention, half of it on each side."""
    activation: Literal["relu", "gelu", "geglu", "swiglu"] = "geglu"
    """Feed-forward non-linearity; the last two are gated."""
    attention_bias: bool = False
    """The attention projections have biases."""
    mlp_bias: bool = False
    """The feed-forward projections have biases."""
    type_vocab_size: NonNegative = 0
    """Rows of the segment (token type) table; 0: none."""
    embedding_dropout: BelowOne = 0.0
    """Dropout on the embeddings, in [0, 1)."""
    attention_dropout: BelowOne = 0.0
    """Dropout on the attention weights, in [0, 1)."""
    hidden_dropout: BelowOne = 0.0
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
    initializer_range: AboveZero = 0.02
    """Standard deviation of the initial weights, truncated at two of them."""

    def __post_init__(self) -> None:
        hidden, heads, width = self.hidden_size, self.num_attention_heads, self.embedding_width
        below = hidden // heads * heads
        fits = " or ".join(str(size) for size in (below, below + heads) if size)
        rule = f"must be a multiple of model.num_attention_heads={heads}; try {fits}"
        require(hidden % heads == 0, "model.hidden_size", hidden, rule)
        odd = self.position_embedding == "rotary" and (hidden // heads) % 2
        rule = f"gives {heads} heads of odd width {hidden // heads}; rotary positions need an even width"
        require(not odd, "model.hidden_size", hidden, rule)
        odd = self.position_embedding == "sinusoidal" and width % 2
        rule = f"pairs sines with cosines, so the embeddings' width {width} must be even"
        require(not odd, "model.position_embedding", self.position_embedding, rule)
        shifted = self.norm == "rmsnorm" and self.norm_bias
        require(not shifted, "model.norm_bias", True, "needs model.norm=layernorm: RMSNorm has no shift")
        rule = "needs model.head_transform=True, or model.tie_word_embeddings=False"
        same = not self.tie_word_embeddings or self.output_width == width
        require(same, "model.embedding_size", self.embedding_size, rule)
        # One spelling for one model, so that two configurations can be compared.
        if width == hidden:
            self.embedding_size = None
        if self.final_norm == (self.norm_position == "pre"):
            self.final_norm = None
        if self.pooling is None:
            self.pooling = "cls" if self.norm_position == "pre" else "cls_tanh"

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
        """Return a copy whose `vocab_size` and `max_position_embeddings` are numbers; see `check_fit`."""
        resolved = replace(
            self,
            vocab_size=self.vocab_size or -(-tokenizer_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            max_position_embeddings=self.max_position_embeddings or seq_len,
        )
        resolved.check_fit(tokenizer_size, seq_len)
        return resolved

    def check_fit(self, tokenizer_size: int, seq_len: int) -> None:
        """Raise InputError unless a vocabulary and rows of `seq_len` tokens fit into the tables."""
        size, longest = self.vocab_size, self.max_position_embeddings
        rule = f"is smaller than the tokenizer, which has {tokenizer_size} entries"
        require(size is None or size >= tokenizer_size, "model.vocab_size", size, rule)
        rule = f"is longer than model.max_position_embeddings={longest}; use {longest} at most"
        if self.position_embedding in ("rotary", "none"):
            rule += ", or make a run's model longer with --branch RUN"
        require(longest is None or seq_len <= longest, "data.seq_len", seq_len, rule)


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
        require(0 <= self.dropout < 1, "classifier_dropout", self.dropout, "must be in [0, 1)")

    def order_of(self, labels: tuple[str, ...]) -> list[int] | None:
        """Return the ids of these names here, ignoring case unless that merges two; None: others."""
        own, wanted = list(self.labels), list(labels)
        if set(own) != set(wanted):
            own, wanted = ([label.lower() for label in names] for names in (own, wanted))
        ids = {label: number for number, label in enumerate(own)}
        same = ids.keys() == set(wanted) and len(ids) == len(own) == len(wanted)
        return [ids[label] for label in wanted] if same else None
