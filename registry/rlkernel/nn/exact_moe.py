"""Mixtures of experts by the operators whose bits do not depend on the batch: `route` and `grouped_linear`.

transformers' block calls its router, and then its experts with what the router gave: logits, gates and ids. The exact
router gives a `RouteResult` in the place of the ids, which says in which order rows stand too. Both hold the parameters
of the module that they replace, under the same names.

Legend: T tokens · E experts · k experts of a token · D width · F width of an expert.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_core.spec.route import RouteResult

ROUTERS: Final = ("Qwen3MoeTopKRouter", "MixtralTopKRouter")
EXPERTS: Final = ("Qwen3MoeExperts", "MixtralExperts")


class ExactRouter(torch.nn.Module):
    """A router of transformers by `rlkernel.linear` and `rlkernel.route`."""

    @classmethod
    def of(cls, router: torch.nn.Module) -> ExactRouter:
        """In the place of `router`, and of its class too: transformers records the logits of modules by class."""
        made: ExactRouter = type(f"Exact{type(router).__name__}", (cls, type(router)), {})(router)
        return made

    def __init__(self, router: torch.nn.Module) -> None:
        self.__dict__ = router.__dict__  # one state for both: what moves, casts or hooks one does so to the other

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, RouteResult]:  # [..., D]
        """Logits [T, E], gates [T, k] in fp32, and the choice of all tokens of `hidden`."""
        router: Any = self
        logits = rlk.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        # Mixtral's router has no `norm_topk_prob`: its gates always sum to 1.
        out = rlk.route(logits, top_k=router.top_k, renormalize=bool(getattr(router, "norm_topk_prob", True)))
        return logits, out.gates, out


class ExactExperts(torch.nn.Module):
    """Gated experts of transformers by two `rlkernel.grouped_linear` with `rlkernel.glu` between them."""

    gate_up_proj: Tensor  # [E, 2 F, D], the gate first
    down_proj: Tensor  # [E, D, F]

    def __init__(self, experts: Any, activation: str) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.activation = experts.gate_up_proj, experts.down_proj, activation

    def forward(self, x: Tensor, routed: RouteResult, gates: Tensor) -> Tensor:  # [T, D] -> [T, D]
        """The sum of gate times expert over the choices of each token, best first: in fp32 and rounded once."""
        D, k = x.shape[1], gates.shape[1]
        # Not x[order // k], whose gradient adds the rows of a token in an order of its own.
        rows = x[:, None].expand(-1, k, D).reshape(-1, D).index_select(0, routed.order)
        h = rlk.glu(rlk.grouped_linear(rows, self.gate_up_proj, routed.ends), activation=self.activation)
        y = rlk.grouped_linear(h, self.down_proj, routed.ends)
        pairs = torch.empty_like(y).index_copy(0, routed.order, y).view(-1, k, D)
        total = gates[:, 0, None] * pairs[:, 0]
        for choice in range(1, k):
            total = total + gates[:, choice, None] * pairs[:, choice]
        return total.to(x.dtype)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{tuple(self.gate_up_proj.shape)}, {self.activation}"
