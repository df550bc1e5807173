"""A mixture of experts by the operators whose bits do not depend on the batch: `route` and `grouped_linear`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel.nn.exact import activation_of
from rlkernel_core.errors import HostError


class ExactMoE(torch.nn.Module):
    """The router and the experts of transformers' Qwen3-MoE and Mixtral; names of parameters stay.

    Logits of the router are of the dtype of x, gates fp32; products of experts are rounded once each, and their sum
    over the experts of a token, best first, is fp32 and rounded once. transformers rounds gates (Qwen3-MoE) and each
    addition.

    Legend: T tokens · k experts of a token · D width.
    """

    def __init__(self, block: Any, activation: str) -> None:
        super().__init__()
        self.gate, self.experts, self.activation = block.gate, block.experts, activation
        self.top_k, self.renormalize = int(block.gate.top_k), bool(getattr(block.gate, "norm_topk_prob", True))

    def forward(self, x: Tensor) -> Tensor:  # [..., D] -> [..., D]
        """The gated sum of the experts of each token."""
        D, k = x.shape[-1], self.top_k
        tokens = x.reshape(-1, D)
        r = rlk.route(rlk.linear(tokens, self.gate.weight), top_k=k, renormalize=self.renormalize)
        # Each pair has a row before rows are put in order: the gradient of a token is then a sum over its k pairs, in
        # their order, and no scattered addition.
        rows = tokens[:, None].expand(-1, k, D).reshape(-1, D).index_select(0, r.order)
        halves = rlk.grouped_linear(rows, self.experts.gate_up_proj, r.ends)
        rows = rlk.grouped_linear(rlk.glu(halves, activation=self.activation), self.experts.down_proj, r.ends)
        pairs = torch.empty_like(rows).index_copy(0, r.order, rows).view(-1, k, D)
        total = r.gates[:, 0, None] * pairs[:, 0]
        for choice in range(1, k):
            total = total + r.gates[:, choice, None] * pairs[:, choice]
        return total.to(x.dtype).view(x.shape)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"top_k={self.top_k}, renormalize={self.renormalize}, {self.activation}"


def is_moe(module: Any) -> bool:
    """Whether a module has a router and packed experts, and nothing else."""
    children = dict(module.named_children())
    return (
        children.keys() == {"gate", "experts"}
        and hasattr(children["gate"], "top_k")
        and all(hasattr(children["experts"], name) for name in ("gate_up_proj", "down_proj", "act_fn"))
    )


def exact_moe(path: str, block: Any, config: Any) -> ExactMoE:
    """What replaces a mixture of experts.

    Raises:
        HostError: its activation is none of glu's, it has noise on its inputs, or the model's router logits are asked
            for, which are captured from the module that is replaced.
    """
    if getattr(block, "jitter_noise", 0.0) > 0:
        raise HostError(f"{path} has router_jitter_noise, which no rollout repeats: set it to 0. Nothing was changed")
    if getattr(config, "output_router_logits", False):
        raise HostError(
            f"the model's output_router_logits asks for what {path} no longer returns: set it to False, and add the "
            "balancing loss by hand. Nothing was changed"
        )
    return ExactMoE(block, activation_of(f"{path}.experts.act_fn", block.experts.act_fn))
