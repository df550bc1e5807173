"""The demo's transformer by operators of exact bits: trainer and rollout add in one order, on the same int4 weights.

The trainer computes with what its weights are after quantization, and passes gradients to the weights themselves
(straight-through, Bengio et al., arXiv:1308.3432). The rollout quantizes the same weights, so both multiply with the
same numbers; the rest is one function for both, over rows of whole sequences there and one row a sequence here.

Legend: B sequences · T tokens · N rows · D hidden · H heads · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.demo.model import LINEARS, Decoder, Policy, Shape

EPS = 1e-6
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v [N, H, D / H] -> [N, H, D / H]


class _StraightThrough(torch.autograd.Function):
    """What a weight becomes, with the gradient that the weight itself would have."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stands_for: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return stands_for.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def norm(x: Tensor) -> Tensor:
    """RMS norm without weights."""
    result: Tensor = rlk.rms_norm(x, x.new_ones(x.shape[-1]), eps=EPS).y
    return result


def layers(x: Tensor, blocks: Sequence[Mapping[str, Tensor]], heads: int, attend: Attend) -> Tensor:
    """Hidden states [N, D] of rows x [N, D] that embeddings gave; `blocks` are the weights of each layer."""
    N, D = x.shape
    for i, weights in enumerate(blocks):
        q, k, v = rlk.linear(norm(x), weights["qkv"]).view(N, 3, heads, D // heads).unbind(1)
        x = rlk.linear(attend(i, q, k, v).reshape(N, D), weights["out"], residual=x)
        up = torch.nn.functional.gelu(rlk.linear(norm(x), weights["up"]))
        x = rlk.linear(up, weights["down"], residual=x)
    return norm(x)


class ExactPolicy(Policy):
    """The trainer's model, which computes with its weights as the rollout stores them."""

    def __init__(self, shape: Shape, fmt: str, dtype: torch.dtype) -> None:
        super().__init__(shape)
        self.format, self.dtype = fmt, dtype

    @classmethod
    def of(cls, policy: Policy, fmt: str, dtype: torch.dtype) -> ExactPolicy:
        """A policy's parameters, from now on as the rollout stores them in format `fmt`."""
        made = cls(policy.shape, fmt, dtype).to(policy.head.weight.device)
        made.load_state_dict(policy.state_dict())
        return made

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states [B, T, D] of full sequences [B, T]."""
        B, T = ids.shape
        rows = self.tokens.weight.to(self.dtype)[ids] + self.positions.weight.to(self.dtype)[:T]
        cu = torch.arange(0, B * T + 1, T, dtype=torch.int32, device=ids.device)

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result: Tensor = rlk.attention(q, k, v, cu_q=cu, max_k=T).out
            return result

        blocks = [{name: self._stored(getattr(block, name).weight) for name in LINEARS} for block in self.blocks]
        return layers(rows.flatten(0, 1), blocks, self.shape.heads, attend).view(B, T, -1)

    def _stored(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            stored = rlk.dequantize(rlk.quantize(weight.detach().to(self.dtype), self.format), dtype=self.dtype)
        stands: Tensor = _StraightThrough.apply(weight, stored)  # type: ignore[no-untyped-call]
        return stands


class ExactDecoder(Decoder):
    """The rollout's model: each sequence's keys are one page, as long as the context."""

    def __init__(self, policy: Policy, batch: int, fmt: str, dtype: torch.dtype) -> None:
        super().__init__(policy, batch, fmt, dtype)
        shape, device = policy.shape, policy.head.weight.device
        sizes = (shape.layers, 2, batch, shape.context, shape.heads, shape.hidden // shape.heads)
        self.cache = torch.zeros(sizes, device=device, dtype=dtype)
        self.pages = torch.arange(batch, dtype=torch.int32, device=device)[:, None]
        self.one_each = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def static(self) -> list[Tensor]:
        """Every tensor that the decode step reads or writes in place."""
        return [*super().static(), self.pages, self.one_each]

    def hidden(self, ids: Tensor, at: Tensor) -> Tensor:
        """Hidden states [B, D] after the tokens ids [B], which stand at position at [1] of every sequence."""
        used = (at + 1).int().expand(ids.shape[0])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache[layer]
            keys.index_copy_(1, at, k[:, None])
            values.index_copy_(1, at, v[:, None])
            result: Tensor = rlk.attention(
                q, keys, values, cu_q=self.one_each, page_table=self.pages, seqused_k=used
            ).out
            return result

        blocks = [{n: rlk.dequantize(w, dtype=self.dtype) for n, w in weights.items()} for weights in self.weights]
        return layers(self.tokens[ids] + self.positions[at], blocks, self.shape.heads, attend)
