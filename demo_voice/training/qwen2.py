"""Qwen2 for training: state_dict and values of transformers' network, capturable as a CUDA graph, with dropout."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.random_weights.llm import LLMSizes

EPSILON = 1e-6
Rotation = tuple[Tensor, Tensor]  # cosines and sines (L, D) of the rotary position embedding
SPREAD = 0.05  # standard deviation of the initial weights
# Where training shows the place of the text: early enough for the layers after it to use what it finds.
GUIDED_LAYER, GUIDED_HEADS = 2, 2


class Qwen2(nn.Module):
    """The output head is the embedding (tied)."""

    def __init__(self, sizes: LLMSizes, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.model = _QwenBody(sizes, vocabulary, dropout)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=SPREAD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """ids (B, L) -> logits (B, L, vocabulary), the features (B, L, hidden) that they are made of, and the guided
        heads' attention (B, GUIDED_HEADS, L, L) as logarithms; causal."""
        features, attention = self.model(ids)
        return F.linear(features, self.model.embed_tokens.weight), features, attention


class _QwenBody(nn.Module):
    def __init__(self, sizes: LLMSizes, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(_QwenLayer(sizes, dropout) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden, EPSILON)
        self._sizes, self._dropout = sizes, dropout

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(self.embed_tokens(ids), self._dropout, self.training)
        head = self._sizes.hidden // self._sizes.heads
        turns = rotation(ids.shape[1], head, self._sizes.rope_theta, ids.device)
        guided: list[Tensor] = []
        for index, layer in enumerate(self.layers):
            x = layer(x, turns, guided if index == GUIDED_LAYER else None)
        return self.norm(x), guided[0]


class _QwenLayer(nn.Module):
    def __init__(self, sizes: LLMSizes, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.hidden, EPSILON)
        self.self_attn = _QwenAttention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden, EPSILON)
        self.mlp = _QwenMLP(sizes)
        self._dropout = dropout

    def forward(self, x: Tensor, turns: Rotation, guided: list[Tensor] | None) -> Tensor:
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), turns, guided), self._dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self._dropout, self.training)


class _QwenAttention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, sizes: LLMSizes) -> None:
        super().__init__()
        self._head = sizes.hidden // sizes.heads
        self._shared = sizes.heads // sizes.kv_heads
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden)
        self.k_proj = nn.Linear(sizes.hidden, sizes.kv_heads * self._head)
        self.v_proj = nn.Linear(sizes.hidden, sizes.kv_heads * self._head)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, turns: Rotation, guided: list[Tensor] | None) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self._head)).transpose(1, 2)  # (B, L, H * D) -> (B, H, L, D)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (rotated(part, turns) for part in (query, key))
        key, value = (part.repeat_interleave(self._shared, dim=1) for part in (key, value))
        if guided is not None:
            guided.append(log_attention(query[:, :GUIDED_HEADS], key[:, :GUIDED_HEADS]))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _QwenMLP(nn.Module):
    def __init__(self, sizes: LLMSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def log_attention(query: Tensor, key: Tensor) -> Tensor:
    """Logarithms of the weights (B, H, L, L) of causal attention; query, key (B, H, L, D)."""
    scores = (query @ key.transpose(2, 3)).float() / query.shape[3] ** 0.5
    future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -torch.inf).log_softmax(-1)


def rotation(length: int, head: int, theta: float, device: torch.device) -> Rotation:
    frequency = theta ** -(torch.arange(0, head, 2, device=device) / head)
    angles = torch.arange(length, device=device)[:, None] * torch.cat([frequency, frequency])
    return angles.cos(), angles.sin()


def rotated(x: Tensor, turns: Rotation) -> Tensor:
    """Rotary position embedding of x (B, H, L, D), halves paired; `turns`: cosines and sines (L, D)."""
    cosine, sine = turns
    low, high = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-high, low], dim=-1) * sine).to(x.dtype)
