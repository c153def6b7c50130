"""Bidirectional multi-head self-attention over rows of documents, and the positions of their tokens.

- tokens with the same number in the attention mask belong to one document; positions restart in each, and
  others are not seen, so a packed document is computed as if it were alone
- rotary: element i is paired with element i + K/2, as in ModernBERT's published weights (Su et al. 2021,
  arXiv:2104.09864, sec. 3.2); sinusoidal: a fixed table (Vaswani et al. 2017, arXiv:1706.03762, sec. 3.5)
- three ways to compute the same: plain matrix products, for short rows on a CPU; torch's fused kernel; and on
  a GPU its kernel for documents of any length, which skips pairs of tokens of different documents

Sizes: B batch, S sequence, D hidden, H heads, K head width (D = H * K), M selected tokens a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from mlm.config.model import ModelConfig

LONGEST_BY_MATMUL = 1024
"""Longest row for plain products on a CPU: their B*H*S*S scores would fill the memory beyond it."""

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position's angles, each (1 or B, 1, S, K/2)."""


class DocumentOffsets(NamedTuple):
    """Starts of the documents in a batch whose rows are joined to one: a compact form of `document_bias`."""

    starts: Tensor
    """(N + 1,) int32, ascending; unused slots and the last one hold B * S."""


def document_bias(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, S, S), added to the attention scores: 0 within a document, minus infinity across.

    Padding (number 0) attends to padding, so that every token attends to something.
    """
    apart = attention_mask[:, None, :, None] != attention_mask[:, None, None, :]
    return torch.zeros_like(apart, dtype=dtype).masked_fill_(apart, float("-inf"))


def document_offsets(attention_mask: Tensor, most: int) -> DocumentOffsets:
    """Return where each run of equal numbers begins, without asking the device how many there are.

    `most` bounds the runs in a row, padding included; with more the result is wrong.
    """
    B, S = attention_mask.shape
    begins = torch.ones_like(attention_mask, dtype=torch.bool)
    begins[:, 1:] = attention_mask[:, 1:] != attention_mask[:, :-1]
    run = begins.flatten().cumsum(0) - 1
    places = torch.arange(B * S, dtype=torch.int32, device=run.device)
    starts = places.new_full((B * most + 1,), B * S)
    return DocumentOffsets(starts.scatter_reduce(0, run.clamp(max=B * most), places, "amin"))


def distance_bias(index: Tensor, window: int | None, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return (S, S), added to the attention scores: 0 where a token may look, minus infinity elsewhere.

    `index` (S,) holds positions in a row; a token sees up to half a `window` on each side (None: any
    distance), in causal attention no later token.
    """
    ahead = index - index[:, None]
    far = ahead.abs() > (len(index) if window is None else window // 2)
    return torch.zeros_like(ahead, dtype=dtype).masked_fill_(far | (causal & (ahead > 0)), float("-inf"))


def document_positions(attention_mask: Tensor) -> Tensor:
    """Return (B, S), the distance of each token from the first token of its document, numbered 0 to S."""
    B, S = attention_mask.shape
    document = attention_mask.long()
    index = torch.arange(S, device=document.device).expand(B, S)
    first = index.new_zeros(B, S + 1).scatter_reduce(1, document, index, "amin", include_self=False)
    return index - first.gather(1, document)


def sinusoids(rows: int, width: int) -> Tensor:
    """Return (rows, width) float32: column 2i is sin(row / 10000^(2i/width)), column 2i + 1 its cosine."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class SinusoidalEmbedding(nn.Embedding):
    """A frozen table of positions, looked up like a learned one."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.weight.requires_grad_(False)


@torch.library.custom_op("mlm::compute_rotation", mutates_args=())
def compute_rotation(
    positions: Tensor, theta: float, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions' angles, computed in float32 and cast to `dtype`.

    Positions are (1 or B, S), the results (1 or B, 1, S, K/2) with K = `width`. A custom operation without
    gradient, opaque to the compiler, which would otherwise recompute the angles in every layer for each head.
    """
    pairs = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / width)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


@compute_rotation.register_fake
def _(positions: Tensor, theta: float, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, positions.shape[1], width // 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def apply_rotary(states: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate each pair (element i, element i + K/2) of `states` (..., B, H, S, K) by its position's angle."""
    if rotation is None:
        return states
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class BlockLinear(nn.Linear):
    """A linear layer whose weight stacks `blocks` matrices, along rows and along columns, for Muon."""

    def __init__(self, in_features: int, out_features: int, blocks: tuple[int, int], bias: bool) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.blocks = blocks


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
        """Return the attended states, (B, S, D), or (B, M, D) of the selected tokens.

        Args:
            hidden: (B, S, D).
            bias: (B, 1, S, S) added to the scores, or the documents, if `can_attend_by_document`.
            rotation: see `compute_rotation`.
            selected: (B, M) int64, the tokens that attend, each to all tokens; None: all.
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
            if rotation is not None:
                cos, sin = (table.take_along_dim(places, dim=2) for table in rotation)
                rotation = cos, sin
            query = apply_rotary(query, rotation)
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

    Queries, keys, values and the result are (B, H, S, K), the bias is (B, 1, S, S); with M queries result and
    bias have M rows. `dropout` is the share of the attention weights that is dropped.
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
    """Return (B, S, H, K), the transposed result of `attend_by_kernel` for the same documents."""
    B, H, S, K = query.shape
    query, key, value = (states.transpose(1, 2).reshape(B * S, H, K) for states in (query, key, value))
    context = varlen_attn(query, key, value, documents.starts, documents.starts, S, S)
    assert isinstance(context, Tensor), "a pair only if log-sum-exps are asked for"
    return context.view(B, S, H, K)
