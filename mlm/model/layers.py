"""The encoder layer and its parts.

- norms are before each sublayer (pre) or after each sum (post), Xiong et al. 2020 (arXiv:2002.04745)
- a norm is LayerNorm, or RMSNorm, which does not subtract the mean (Zhang & Sennrich 2019, arXiv:1910.07467)
- the feed-forward part is plain, or gated: act(a) * b (Shazeer 2020, arXiv:2002.05202)
- all initial values are set in one place, `init_weights`

Sizes: B batch, S sequence, D hidden, F feed-forward width, M selected tokens a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.config.model import ModelConfig
from mlm.model.attention import BlockLinear, SelfAttention, compute_dtype, select
from mlm.model.positions import DocumentOffsets, Rotation, SinusoidalEmbedding, sinusoids

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "geglu": F.gelu,
    "swiglu": F.silu,
}
"""Non-linearity of each `ModelConfig.activation`, if gated that of the gate; GELU is the exact erf form."""


def build_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Return a normalisation layer over `width` features; None: over the hidden size."""
    width = width or config.hidden_size
    if config.norm == "rmsnorm":
        return nn.RMSNorm(width, eps=config.norm_eps)
    return nn.LayerNorm(width, eps=config.norm_eps, bias=config.norm_bias)


class FeedForward(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D), each token independently."""
        return self.down(self.activation(self.up(hidden)))


class GatedFeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.gate_up = BlockLinear(config.hidden_size, 2 * config.intermediate_size, (2, 1), config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (B, S, D) to (B, S, D), each token independently."""
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
        self.feed_forward = GatedFeedForward(config) if config.gated else FeedForward(config)
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
