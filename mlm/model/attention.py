"""Bidirectional multi-head self-attention.

- one fused projection for queries, keys and values
- three ways to compute the same: plain matrix products, for short rows on a CPU; torch's fused kernel; and on
  a GPU its kernel for documents of any length, which skips pairs of tokens of different documents
- bias and rotation depend on the positions alone; the encoder computes them once per forward pass

Vaswani et al. 2017 (arXiv:1706.03762), sec. 3.2.

Sizes: B batch, S sequence, D hidden, H heads, K head width (D = H * K), M selected tokens a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from mlm.config.model import ModelConfig
from mlm.model.positions import DocumentOffsets, Rotation, apply_rotary, select_rotation

LONGEST_BY_MATMUL = 1024
"""Longest row for plain products on a CPU: their B*H*S*S scores would fill the memory beyond it."""


class BlockLinear(nn.Linear):
    """A linear layer whose weight stacks several matrices; `blocks`: how many along rows and along columns.

    Muon orthogonalises each matrix by itself, see `matrix_blocks`.
    """

    def __init__(self, in_features: int, out_features: int, blocks: tuple[int, int], bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.blocks = blocks


def matrix_blocks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the `blocks` of every stacked weight, by its name in `model.named_parameters()`."""
    modules = model.named_modules()
    return {f"{name}.weight": module.blocks for name, module in modules if isinstance(module, BlockLinear)}


class SelfAttention(nn.Module):
    """Every token gathers from the tokens it may see."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, H = config.hidden_size, config.num_attention_heads
        self.num_heads = H
        self.dropout = config.attention_dropout
        self.query_key_value = BlockLinear(D, 3 * D, (3 * H, 1), bias=config.attention_bias)
        self.output = BlockLinear(D, D, (1, H), bias=config.attention_bias)

    def forward(
        self,
        hidden: Tensor,
        bias: Tensor | DocumentOffsets | None = None,
        rotation: Rotation | None = None,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Return the attended states.

        Args:
            hidden: (B, S, D) float.
            bias: (B, 1, S, S) float added to the scores, see `document_bias`; None: nothing. Or the starts of
                the documents, if `can_attend_by_document`.
            rotation: see `compute_rotation`; None: no rotation.
            selected: (B, M) int64, the tokens that attend, each to all tokens; None: all.

        Returns:
            (B, S, D) float, or (B, M, D).
        """
        S = hidden.shape[1]
        hidden = hidden.to(compute_dtype(hidden))
        value = self._project(hidden, 2, 3)[0]
        if selected is None or isinstance(bias, DocumentOffsets):
            query, key = apply_rotary(self._project(hidden, 0, 2), rotation).unbind(0)
        else:
            places = selected[:, None, :, None]  # (B, 1, M, 1)
            key = apply_rotary(self._project(hidden, 1, 2)[0], rotation)
            query = self._project(select(hidden, selected), 0, 1)[0]
            query = apply_rotary(query, select_rotation(rotation, places))
            bias = None if bias is None else bias.take_along_dim(places, dim=2)
        if isinstance(bias, DocumentOffsets):
            context = attend_by_document(query, key, value, bias).flatten(2)
            return self.output(select(context, selected))
        by_matmul = hidden.device.type == "cpu" and S <= LONGEST_BY_MATMUL
        attend = attend_by_matmul if by_matmul else attend_by_kernel
        context = attend(query, key, value, bias, self.dropout if self.training else 0.0)
        return self.output(context.transpose(1, 2).flatten(2))

    def _project(self, hidden: Tensor, first: int, end: int) -> Tensor:
        """Return (P, B, H, S, K), P of queries, keys and values: those from `first` to before `end`."""
        B, S, D = hidden.shape
        rows, bias = slice(first * D, end * D), self.query_key_value.bias
        states = F.linear(hidden, self.query_key_value.weight[rows], None if bias is None else bias[rows])
        states = states.view(B, S, end - first, self.num_heads, D // self.num_heads)
        # contiguous: one copy here avoids slower strided ones in the rotation and in the products
        return states.permute(2, 0, 3, 1, 4).contiguous()


def compute_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype of matrix products with `states`: autocast's if it is on, except for float64.

    Autocast casts for every product; a tensor that goes into several is cast once, before.
    """
    kind = states.device.type
    casts = torch.is_autocast_enabled(kind) and states.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else states.dtype


def select(states: Tensor, selected: Tensor | None) -> Tensor:
    """Return (B, M, D), the `selected` (B, M) tokens of `states` (B, S, D); None: all."""
    return states if selected is None else states.take_along_dim(selected[..., None], dim=1)


def attend_by_matmul(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float
) -> Tensor:
    """Return softmax(query key^T / sqrt(K) + bias) value, written out.

    Queries, keys, values and the result are (B, H, S, K), the bias is (B, 1, S, S) or None; with M queries
    result and bias have M rows. `dropout` is the share of the attention weights that is dropped.
    """
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)  # (B, H, S or M, S)
    if bias is not None:
        scores = scores + bias
    return F.dropout(scores.softmax(dim=-1), dropout) @ value


def attend_by_kernel(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float
) -> Tensor:
    """Return the same as `attend_by_matmul`, computed by one fused kernel."""
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)


def can_attend_by_document(device: torch.device, dtype: torch.dtype, dropout: float) -> bool:
    """Return whether `attend_by_document` works: its kernel is for CUDA, half precision, no dropout."""
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and not dropout


def attend_by_document(query: Tensor, key: Tensor, value: Tensor, documents: DocumentOffsets) -> Tensor:
    """Return (B, S, H, K), the transposed result of `attend_by_kernel` for the same documents.

    Queries, keys and values are (B, H, S, K).
    """
    B, H, S, K = query.shape
    query, key, value = (states.transpose(1, 2).reshape(B * S, H, K) for states in (query, key, value))
    context = varlen_attn(query, key, value, documents.starts, documents.starts, S, S)
    assert isinstance(context, Tensor), "a pair only if log-sum-exps are asked for"
    return context.view(B, S, H, K)
