"""A small causal transformer, twice: as the trainer holds it, and as the rollout runs it on int4 weights.

The two share their weights by re-quantization after every update. They are different programs on purpose (full
sequences there, one token at a time from a KV cache and packed weights here), because that is what a trainer
and a rollout engine are; the demo measures how far apart their log-probabilities are.

Legend: B sequences · T tokens · D hidden · H heads · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 the field's name for it

import rlkernel as rlk

LINEARS: Final = ("qkv", "out", "up", "down")


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int
    context: int
    hidden: int = 128
    layers: int = 2
    heads: int = 4


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d = shape.hidden
        self.heads = shape.heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Full sequences, x [B, T, D]."""
        B, T, D = x.shape
        q, k, v = self.qkv(norm(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D))
        mixed: Tensor = x + self.down(F.gelu(self.up(norm(x))))
        return mixed


class Policy(nn.Module):
    """The trainer's model: token ids [B, T] to the hidden states [B, T, D] that the head reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.context, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        for p in self.parameters():
            nn.init.normal_(p, std=0.02 if p.shape[0] in {shape.vocab, shape.context} else p.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states of full sequences."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return norm(x)


def norm(x: Tensor) -> Tensor:
    """RMS norm without weights, so that every parameter is a matrix."""
    return F.rms_norm(x, (x.shape[-1],))


class Decoder:
    """The rollout's model: int4 weights, a KV cache of fixed size, one token per sequence and call."""

    def __init__(self, policy: Policy, batch: int, fmt: str, dtype: torch.dtype) -> None:
        shape, device = policy.shape, policy.head.weight.device
        self.shape, self.format, self.dtype = shape, fmt, dtype
        sizes = (shape.layers, 2, batch, shape.heads, shape.context, shape.hidden // shape.heads)
        self.cache = torch.zeros(sizes, device=device, dtype=dtype)
        self.tokens, self.positions, self.head = (
            w.detach().to(dtype, copy=True) for w in (policy.tokens.weight, policy.positions.weight, policy.head.weight)
        )
        self.weights = [
            {name: rlk.quantize(weight, fmt) for name, weight in self._linears(block).items()}
            for block in policy.blocks
        ]

    def static(self) -> list[Tensor]:
        """Every tensor that the decode step reads or writes in place."""
        packed = [part for weights in self.weights for w in weights.values() for part in w.parts.values()]
        return [self.tokens, self.positions, self.head, self.cache, *packed]

    @torch.no_grad()
    def sync(self, policy: Policy) -> None:
        """Take over the trainer's weights in place: re-quantized into the same storage, as a captured graph needs."""
        self.tokens.copy_(policy.tokens.weight)
        self.positions.copy_(policy.positions.weight)
        self.head.copy_(policy.head.weight)
        for mine, block in zip(self.weights, policy.blocks, strict=True):
            for name, weight in self._linears(block).items():
                rlk.quantize(weight, self.format, out=mine[name])

    def logits(self, ids: Tensor, at: Tensor) -> Tensor:
        """Logits [B, V] after the tokens ids [B], which stand at position at [1] of every sequence."""
        B, H = ids.shape[0], self.shape.heads
        x = self.tokens[ids] + self.positions[at]
        seen = (torch.arange(self.shape.context, device=ids.device) <= at)[None, None, None]
        for weights, (keys, values) in zip(self.weights, self.cache, strict=True):
            q, k, v = rlk.qmatmul(norm(x), weights["qkv"]).view(B, 3, H, 1, -1).unbind(1)
            keys.index_copy_(2, at, k)
            values.index_copy_(2, at, v)
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
            x = x + rlk.qmatmul(mixed.reshape(B, -1), weights["out"])
            x = x + rlk.qmatmul(F.gelu(rlk.qmatmul(norm(x), weights["up"])), weights["down"])
        return norm(x) @ self.head.T

    def _linears(self, block: nn.Module) -> dict[str, Tensor]:
        return {name: getattr(block, name).weight.detach().to(self.dtype) for name in LINEARS}
