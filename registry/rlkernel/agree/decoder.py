"""The built-in model: the demo's small decoder with random weights, token by token and in whole sequences.

`invariant` computes both the same way, row by row: every matmul is a block of `ROWS` rows filled up with zeros, since
libraries choose the order of their sums by shape, and every other sum is a halving tree of elementwise additions, whose
bits depend on the row alone. Stock is what torch does, which is faster and differs in the last bits.

Legend: B sequences · T tokens · N rows · D hidden · H heads · d of a head · C context · K inputs · n outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 the field's name for it

from rlkernel.demo.model import Block, Policy, Shape, norm
from rlkernel_core.errors import ArgumentError

ROWS: Final = 64


class Model(Protocol):
    """A decoder as a rollout engine runs it and as a trainer does."""

    name: str
    vocab: int
    head: Tensor  # [V, D]
    bias: Tensor | None  # [V]

    def start(self, sequences: int, length: int) -> None:
        """Forget every sequence, and make room for some of a length."""
        ...

    def step(self, ids: Tensor, at: int) -> Tensor:
        """Hidden states [B, D] after the tokens ids [B], which stand at position `at`."""
        ...

    def full(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, D] of whole sequences [B, T]."""
        ...


class Decoder:
    """The demo's decoder with a KV cache; all sizes are powers of two, so that no row is computed in an odd corner."""

    def __init__(self, policy: Policy, *, invariant: bool = False) -> None:
        self.name = f"built-in decoder{', invariant' if invariant else ''}"
        self.policy, self.invariant = policy, invariant
        self.vocab, self.head, self.bias = policy.shape.vocab, policy.head.weight, None

    def start(self, sequences: int, length: int) -> None:
        """An empty cache."""
        shape = self.policy.shape
        if length > shape.context:
            raise ValueError(f"{length} tokens do not fit the context of {shape.context}")
        sizes = (shape.layers, 2, sequences, shape.heads, shape.context, shape.hidden // shape.heads)
        self.cache = torch.zeros(sizes, device=self.head.device, dtype=self.head.dtype)

    @torch.no_grad()
    def step(self, ids: Tensor, at: int) -> Tensor:
        """One token a sequence."""
        x = self.policy.tokens.weight[ids] + self.policy.positions.weight[at]
        own = torch.arange(len(ids), device=ids.device)
        places = torch.full_like(own, at)
        for block, cached in zip(self._blocks(), self.cache, strict=True):
            q, k, v = self._qkv(block, x)
            cached[0, :, :, at], cached[1, :, :, at] = k, v
            x = self._rest(block, x, self._attend(q, cached[0], cached[1], own, places))
        return self._norm(x)

    @torch.no_grad()
    def full(self, ids: Tensor) -> Tensor:
        """All tokens at once.

        Raises:
            ArgumentError: longer than its context.
        """
        most = self.policy.shape.context
        if ids.shape[1] > most:
            said = f"{ids.shape[1]} ids"
            raise ArgumentError(
                "ids", said, f"are more than the built-in decoder's {most}", "Name a model of your own."
            )
        if not self.invariant:
            hidden: Tensor = self.policy(ids)
            return hidden
        B, T = ids.shape
        own = torch.arange(B, device=ids.device).repeat_interleave(T)
        places = torch.arange(T, device=ids.device).repeat(B)
        x = self.policy.tokens.weight[ids.flatten()] + self.policy.positions.weight[places]
        for block, cached in zip(self._blocks(), self.cache, strict=True):
            q, k, v = self._qkv(block, x)
            for kind, new in enumerate((k, v)):
                cached[kind, :, :, :T] = new.view(B, T, *new.shape[1:]).transpose(1, 2)
            x = self._rest(block, x, self._attend(q, cached[0], cached[1], own, places))
        return self._norm(x).view(B, T, -1)

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.policy.blocks))

    def _qkv(self, block: Block, x: Tensor) -> tuple[Tensor, ...]:
        return self._linear(self._norm(x), block.qkv.weight).view(len(x), 3, block.heads, -1).unbind(1)

    def _rest(self, block: Block, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self._linear(mixed.reshape(len(x), -1), block.out.weight)
        return x + self._linear(F.gelu(self._linear(self._norm(x), block.up.weight)), block.down.weight)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Rows [N, K] by weight [n, K]."""
        if not self.invariant:
            return F.linear(x, weight)
        return _in_blocks(lambda rows: rows @ weight.T, x)

    def _norm(self, x: Tensor) -> Tensor:
        if not self.invariant:
            return norm(x)
        eps = torch.finfo(x.dtype).eps
        return _in_blocks(lambda rows: rows * torch.rsqrt(_tree(rows * rows) / rows.shape[-1] + eps)[:, None], x)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, own: Tensor, places: Tensor) -> Tensor:
        """Queries [N, H, d], each over the cache [B, H, C, d] of its own sequence up to its own place."""
        positions = torch.arange(keys.shape[2], device=q.device)
        if not self.invariant:
            seen = (positions <= places[:, None])[:, None, None]
            return F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen)[:, :, 0]

        def block(rows: Tensor) -> Tensor:  # [ROWS] row numbers
            some, k, v = q[rows], keys[own[rows]], values[own[rows]]
            score = _tree(some[:, :, None] * k) * q.shape[-1] ** -0.5
            score = score.masked_fill((positions > places[rows, None])[:, None], -torch.inf)
            weight = (score - score.amax(-1, keepdim=True)).exp()
            mixed = _tree((weight[..., None] * v).transpose(-1, -2).contiguous())
            return mixed / _tree(weight)[..., None]

        return _in_blocks(block, torch.arange(len(q), device=q.device))


def _in_blocks(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`run` on blocks of ROWS rows, the last one filled up with zeros."""
    missing = -len(x) % ROWS
    filled = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    return torch.cat([run(rows) for rows in torch.split(filled, ROWS)])[: len(x)]


def _tree(x: Tensor) -> Tensor:
    """Sum over the last dimension, a power of two, by halves."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def builtin(
    *,
    seed: int = 0,
    vocab: int = 4096,
    hidden: int = 128,
    layers: int = 2,
    context: int = 64,
    invariant: bool = False,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> Decoder:
    """The built-in model with random weights.

    Args:
        seed: of the weights.
        vocab: vocabulary.
        hidden: width, a power of two.
        layers: blocks.
        context: most tokens of a sequence, a power of two.
        invariant: compute token by token and in whole sequences to the same bits.
        dtype: of weights and hidden states; fp32 by default.
        device: where.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(Shape(vocab, context, hidden, layers))
        with torch.no_grad():
            policy.head.weight.mul_(50)  # far from uniform, as a trained model is
    return Decoder(policy.to(device=device, dtype=dtype), invariant=invariant)
