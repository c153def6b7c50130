"""The encoder: from token ids to one vector per token.

- modern (Warner et al. 2024, arXiv:2412.13663): tokens -> norm -> pre-norm layers, rotary positions -> norm
- classic (Devlin et al. 2019, arXiv:1810.04805): tokens + positions + types -> norm -> post-norm layers
- everything between is a switch of `ModelConfig`: norms before each sublayer (pre) or after each sum (post,
  Xiong et al. 2020, arXiv:2002.04745), LayerNorm or RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), plain
  or gated feed-forward: act(a) * b (Shazeer 2020, arXiv:2002.05202)

Sizes: B batch, S sequence, D hidden, E width of the tables, F feed-forward width, M selected tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.model.attention import (
    BlockLinear,
    DocumentOffsets,
    Rotation,
    SelfAttention,
    SinusoidalEmbedding,
    can_attend_by_document,
    compute_dtype,
    compute_rotation,
    distance_bias,
    document_bias,
    document_offsets,
    document_positions,
    select,
    sinusoids,
)

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {"relu": F.relu, "gelu": F.gelu, "geglu": F.gelu, "swiglu": F.silu}
"""Non-linearity of each `ModelConfig.activation`, if gated that of the gate; GELU is the exact erf form."""


def build_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Return a normalisation layer over `width` features; None: over the hidden size."""
    width = width or config.hidden_size
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)


class FeedForward(nn.Module):
    """down(act(up(x))), or gated: down(act(gate(x)) * up(x)), gate and up fused; each token independently."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, width = config.hidden_size, config.intermediate_size
        self.gated, self.activation = config.gated, ACTIVATIONS[config.activation]
        if self.gated:
            self.gate_up = BlockLinear(D, 2 * width, (2, 1), bias=config.mlp_bias)
        else:
            self.up = nn.Linear(D, width, bias=config.mlp_bias)
        self.down = nn.Linear(width, D, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D)."""
        if not self.gated:
            return self.down(self.activation(self.up(hidden)))
        hidden = hidden.to(compute_dtype(hidden))
        # one weight but two products, whose gradients need not be copied into one table
        weights, bias = self.gate_up.weight.chunk(2), self.gate_up.bias
        biases = (None, None) if bias is None else bias.chunk(2)
        gate, up = (F.linear(hidden, *pair) for pair in zip(weights, biases, strict=True))  # each (B, S, F)
        return self.down(self.activation(gate) * up)


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each around a residual connection."""

    def __init__(self, config: ModelConfig, attention_norm: bool = True) -> None:
        super().__init__()
        self.pre_norm = config.norm_position == "pre"
        self.attention = SelfAttention(config)
        self.attention_norm = build_norm(config) if attention_norm else nn.Identity()
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = build_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor | DocumentOffsets | None = None,
        rotation: Rotation | None = None,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Map (B, S, D) to (B, S, D), or to (B, M, D); the other arguments as in `SelfAttention.forward`."""
        attended = self.attention_norm(hidden) if self.pre_norm else hidden
        attended = self.dropout(self.attention(attended, bias, rotation, selected))
        hidden = select(hidden, selected) + attended
        if self.pre_norm:
            return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))
        hidden = self.attention_norm(hidden)
        return self.feed_forward_norm(hidden + self.dropout(self.feed_forward(hidden)))


@torch.no_grad()
def init_weights(model: nn.Module, std: float) -> None:
    """Set every initial value of `model`, in place; nothing else does.

    Matrices and tables are normal with standard deviation `std`, truncated at two; biases are 0, norms 1.
    """
    for module in model.modules():
        if isinstance(module, SinusoidalEmbedding):
            module.weight.copy_(sinusoids(*module.weight.shape))
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)


class Embeddings(nn.Module):
    """Sum of the tables, normalised, and projected where the tables are narrower than the layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E = config.embedding_width
        assert config.vocab_size, "ModelConfig.resolve() comes before building a model"
        self.token = nn.Embedding(config.vocab_size, E)
        self.position: nn.Embedding | None = None
        self.token_type: nn.Embedding | None = None
        if config.position_rows:
            table = SinusoidalEmbedding if config.position_embedding == "sinusoidal" else nn.Embedding
            self.position = table(config.position_rows, E)
        if config.type_vocab_size:
            self.token_type = nn.Embedding(config.type_vocab_size, E)
        self.offset = config.position_offset
        self.norm = build_norm(config, E) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.projection = nn.Linear(E, config.hidden_size) if config.embedding_size else nn.Identity()

    def forward(self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Return (B, S, D) for ids (B, S), positions (1 or B, S) and types (B, S), None: all 0."""
        hidden = self.token(input_ids)
        if self.position is not None:
            hidden = hidden + self.position(positions + self.offset)
        if self.token_type is not None:
            types = torch.zeros_like(positions) if token_type_ids is None else token_type_ids
            hidden = hidden + self.token_type(types)
        return self.projection(self.dropout(self.norm(hidden)))


class Encoder(nn.Module):
    """Embeddings and a stack of layers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        numbers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList(EncoderLayer(config, config.has_attention_norm(n)) for n in numbers)
        self.is_local = [config.is_local(n) for n in numbers]
        self.gradient_checkpointing = False
        """Whether training recomputes the activations inside each layer instead of keeping them."""
        self.documents_per_row: int | None = None
        """Upper bound of the documents in a row, padding counted as one, each a contiguous run of its number;
        if set, a GPU attends by document."""
        self.final_norm = build_norm(config) if config.has_final_norm else nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Encode a batch of rows into (B, S, D); InputError: they are longer than max_position_embeddings.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) integer or bool, the document of each token, 0 = padding: a 0/1 mask is one
                document a row, 1..n are n that do not see each other. None: one document, no padding.
            token_type_ids: (B, S) int64; None: all 0.
            selected: (B, M) int64 indices into the row: the result is (B, M, D), their vectors only, and the
                last layer computes just keys and values for the other tokens. None: all.
        """
        S, longest = input_ids.shape[1], self.config.max_position_embeddings
        if longest is not None and longest < S:
            raise InputError(f"a row of {S} tokens exceeds the model's max_position_embeddings={longest}")
        dtype = compute_dtype(self.embeddings.token.weight)
        bias: Tensor | DocumentOffsets | None
        if attention_mask is None:
            bias, positions = None, torch.arange(S, device=input_ids.device)[None]
        else:
            bias, positions = self._documents(attention_mask, dtype), document_positions(attention_mask)
        views = {local: self._view(bias, positions, dtype, local) for local in sorted(set(self.is_local))}
        hidden = self.embeddings(input_ids, positions, token_type_ids)
        last = len(self.layers) - 1
        for number, (layer, local) in enumerate(zip(self.layers, self.is_local, strict=True)):
            inputs = (hidden, *views[local], selected if number == last else None)
            if self.gradient_checkpointing and self.training:
                hidden = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                hidden = layer(*inputs)
        return self.final_norm(hidden)

    def _documents(self, attention_mask: Tensor, dtype: torch.dtype) -> Tensor | DocumentOffsets:
        """Return the separation of documents in the form that the fastest attention takes."""
        config, most = self.config, self.documents_per_row
        dropout = config.attention_dropout if self.training else 0.0
        plain = config.attention == "bidirectional" and not any(self.is_local)
        if most and plain and can_attend_by_document(attention_mask.device, dtype, dropout):
            return document_offsets(attention_mask, most)
        return document_bias(attention_mask, dtype)

    def _view(
        self, bias: Tensor | DocumentOffsets | None, positions: Tensor, dtype: torch.dtype, local: bool
    ) -> tuple[Tensor | DocumentOffsets | None, Rotation | None]:
        """Return bias and rotation for layers with local or full attention."""
        config = self.config
        window, causal = config.local_attention if local else None, config.attention == "causal"
        if (window or causal) and not isinstance(bias, DocumentOffsets):
            index = torch.arange(positions.shape[1], device=positions.device)
            near = distance_bias(index, window, causal, dtype)[None, None]
            bias = near if bias is None else bias + near
        if config.position_embedding != "rotary":
            return bias, None
        theta = config.local_rotary_theta if local else config.rotary_theta
        width = config.hidden_size // config.num_attention_heads
        return bias, compute_rotation(positions, theta, width, dtype)
