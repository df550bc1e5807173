"""One valid call of every operator as arguments by name, so that a test can replace a single one of them.

No two sizes are equal, so that an argument of a wrong size cannot fit by chance.
Legend: N rows · B sequences, two groups of three · T time · V vocabulary · D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rlkernel as rlk

N = B = 6
T, V, D = 5, 64, 32


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int = 0, below: int = V) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def logprobs(*shape: int, seed: int) -> Tensor:
    return -0.1 - draw(*shape, seed=seed).abs()


def tokens() -> Tensor:
    """A token mask [B, T] with a hole and a row of every length but 0."""
    mask = torch.arange(T)[None] < torch.tensor([5, 3, 1, 5, 4, 2])[:, None]
    return mask & (torch.arange(B * T).view(B, T) != 2)


def rewards() -> Tensor:
    return torch.tensor([1.0, 0.0, 0.75, 1.0, 0.5, 0.25])


def step(x: Tensor) -> Tensor:
    """A function worth capturing."""
    return x * 2 + 1


def loss() -> dict[str, Any]:
    return {
        "logprob": logprobs(B, T, seed=1),
        "old_logprob": logprobs(B, T, seed=2),
        "advantages": draw(B, T, seed=3),
        "kind": "ppo",
    }


def head() -> dict[str, Any]:
    return {"hidden": 0.2 * draw(N, D), "weight": draw(V, D, seed=1)}


def linear_loss() -> dict[str, Any]:
    given = {**loss(), "hidden": 0.05 * draw(B, T, D, seed=4), "weight": draw(V, D, seed=1), "ids": ids(B, T)}
    del given["logprob"]
    given["old_logprob"] = given["old_logprob"] - 4  # log V is 4.2
    return given


def drawn() -> dict[str, Any]:
    return {"seed": torch.arange(N), "step": 1}


def base(operator: str) -> dict[str, Any]:
    """The arguments of the call, made anew."""
    return BASES[operator]()


BASES = {
    "logprob": lambda: {"logits": draw(N, V), "ids": ids(N)},
    "linear_logprob": lambda: {**head(), "ids": ids(N)},
    "policy_loss": loss,
    "linear_policy_loss": linear_loss,
    "sample": lambda: {"logits": draw(N, V), **drawn()},
    "lm_head_sample": lambda: {**head(), **drawn()},
    "verify": lambda: {
        "target_logits": draw(N, V),
        "draft_ids": ids(4),
        "cu_draft": torch.tensor([0, 1, 4]),
        "seed": torch.arange(2),
        "step": 1,
    },
    "quantize": lambda: {"weight": draw(V, D), "format": "int4_g32"},
    "dequantize": lambda: {"w": rlk.quantize(draw(V, D), "int4_g32")},
    "prepack": lambda: {"w": rlk.quantize(draw(V, D), "int4_g32")},
    "qmatmul": lambda: {"x": draw(N, D), "w": rlk.quantize(draw(V, D), "int4_g32")},
    "advantage": lambda: {"rewards": rewards(), "kind": "grpo", "group": 3},
    "affine_suffix_scan": lambda: {"b": draw(B, T), "a": draw(B, T, seed=1)},
    "whiten": lambda: {"x": draw(B, T)},
    "group_filter": lambda: {"rewards": rewards(), "group": 3},
    "shape_rewards": lambda: {"rewards": rewards()},
    "capture": lambda: {"fn": step, "example": (draw(4, 3),)},
    "rollout_buffer": lambda: {"max_tokens": 64, "max_seqs": 8, "page_tokens": 4},
}
