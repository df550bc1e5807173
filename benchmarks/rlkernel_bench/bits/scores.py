"""Calls of log-probabilities and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

import rlkernel as rlk
from rlkernel_bench.bits.inputs import Given, Size, Table, changed, draw, head, ids, larger, logprobs, starts

POLICY_KINDS: Final = {
    **{key: {} for key in ("ppo", "grpo", "dr_grpo", "dapo", "gspo", "gspo_token", "luspo", "cispo", "sapo", "gmpo")},
    **{key: {} for key in ("vespo", "reinforce")},
    **{key: {"clip": (0.2, 0.2)} for key in ("dppo_tv", "dppo_kl")},
    "dro": {"dro_beta": 0.1},
}  # kind -> what it cannot do without
KLS: Final = ("k1", "abs", "k2", "k3", "low_var", "k1+", "abs+", "k3+", "low_var+")


def logprob(s: Size) -> Table:
    """Every option, then vocabularies of models at three dtypes."""
    B, V = s.B, s.V
    mask = {"mask": ids(B, below=2, seed=7).bool()}
    found = changed(
        lambda: {"logits": draw(B, V), "ids": ids(B, below=V)},
        {
            "temperature": lambda: {"temperature": 0.5},
            "temperature per row": lambda: {"temperature": torch.linspace(0.5, 2.0, B), "entropy": True},
            "softcap": lambda: {"softcap": 2.0},
            "mask": lambda: mask,
            "entropy": lambda: {"entropy": True},
            "top 3": lambda: {"top_logprobs": 3},
            "support": lambda: {"support": s.support(B)},
            "support, entropy, mask": lambda: {"support": s.support(B), "entropy": True, **mask},
            "validate": lambda: {"validate": True},
            "refused: ids out of range": lambda: {"validate": True, "ids": ids(B, below=V) + V},
            "ids out of range": lambda: {"ids": ids(B, below=V) + V},
            "bfloat16": lambda: {"logits": draw(B, V, dtype=torch.bfloat16), "entropy": True},
            "every second column": lambda: {"logits": draw(B, 2 * V)[:, ::2]},
            "two dimensions of rows": lambda: {"logits": draw(2, 3, V), "ids": ids(2, 3, below=V)},
            "no rows": lambda: {"logits": draw(0, V), "ids": ids(0, below=V)},
            "infinities": lambda: {"logits": draw(B, V).masked_fill(ids(B, V, below=3) == 0, -math.inf)},
        },
    )
    for name, n, v, dtype, more in (
        ("1 x 32000 bfloat16", 1, 32000, torch.bfloat16, {}),
        ("64 x 32000 bfloat16", 64, 32000, torch.bfloat16, {"entropy": True, "temperature": 0.7}),
        ("64 x 32000 float16", 64, 32000, torch.float16, {}),
        ("3 x 128256 bfloat16", 3, 128256, torch.bfloat16, {"entropy": True}),
        ("32 x 128256 float32", 32, 128256, torch.float32, {"entropy": True}),
        ("17 x 50257 float32, top 5", 17, 50257, torch.float32, {"top_logprobs": 5}),
        ("300 x 4099 bfloat16", 300, 4099, torch.bfloat16, {"entropy": True}),
    ):
        found |= larger(
            s,
            name,
            lambda n=n, v=v, d=dtype, m=more: {"logits": draw(n, v, dtype=d, std=4), "ids": ids(n, below=v), **m},
        )
    return found


def linear_logprob(s: Size) -> Table:
    """Options of the head and of the law, both ways backward."""
    B = s.B
    found = changed(
        lambda: {"hidden": draw(B, s.D, std=0.2), "weight": draw(s.V, s.D, seed=1), "ids": ids(B, below=s.V)},
        {
            **head(s),
            "temperature": lambda: {"temperature": 0.5, "entropy": True},
            "temperature per row": lambda: {"temperature": torch.linspace(0.5, 2.0, B)},
            "mask": lambda: {"mask": ids(B, below=2, seed=7).bool(), "entropy": True},
            "support": lambda: {"support": s.support(B)},
            "save": lambda: {"backward": "save"},
            "recompute": lambda: {"backward": "recompute", "entropy": True},
            "workspace": lambda: {"max_workspace_bytes": 2**30},
            "refused: workspace": lambda: {"max_workspace_bytes": 1},
            "mixed dtypes": lambda: {"weight": draw(s.V, s.D, seed=1, dtype=torch.bfloat16)},
        },
    )
    for name, n, v, d in (
        ("64 x 32000 of 512 bfloat16", 64, 32000, 512),
        ("5 x 128256 of 256 bfloat16", 5, 128256, 256),
    ):
        found |= larger(
            s,
            name,
            lambda n=n, v=v, d=d: {
                "hidden": draw(n, d, dtype=torch.bfloat16),
                "weight": draw(v, d, seed=1, std=0.1, dtype=torch.bfloat16),
                "ids": ids(n, below=v),
                "entropy": True,
            },
        )
    return found


def losses(s: Size, entropy: Callable[[], Any]) -> dict[str, Callable[[], Given]]:
    """What policy_loss and linear_policy_loss share."""
    B, T = s.B, s.T

    def reference() -> Given:
        return {"ref_logprob": logprobs(B, T, seed=6), "kl_coef": 0.1}

    def rollout() -> Given:
        return {"rollout_logprob": logprobs(B, T, seed=7)}

    kinds = POLICY_KINDS if not s.small else {k: POLICY_KINDS[k] for k in ("grpo", "gspo", "cispo", "dro")}
    estimators = KLS if not s.small else ("k3", "low_var+")
    return {
        **{f"kind {kind}": lambda k=kind, n=needs: {"kind": k, **n} for kind, needs in kinds.items()},
        **{f"kl {kl}": lambda kl=kl: {**reference(), "kl": kl} for kl in estimators},
        "on policy": lambda: {"old_logprob": None},
        "mask": lambda: {"mask": s.tokens()},
        "sequence level": lambda: {"level": "sequence", "mask": s.tokens()},
        "clip": lambda: {"clip": (0.01, 0.01)},
        "dual clip": lambda: {"dual_clip": 1.01},
        "log ratio limit": lambda: {"log_ratio_limit": 0.1},
        "sapo tau": lambda: {"kind": "sapo", "tau": (0.5, 2.0)},
        "vespo gamma": lambda: {"kind": "vespo", "gamma": rlk.GammaGate(k_pos=1.0)},
        "ratio cap": lambda: {"kind": "dppo_tv", "clip": (0.9, 0.9), "ratio_cap": 1.01},
        "token sum": lambda: {"aggregate": "token_sum"},
        "denominator": lambda: {"denominator": 7.0},
        "horizon": lambda: {"aggregate": "seq_mean_token_sum_norm", "horizon": 11.0},
        "count empty": lambda: {
            "mask": s.tokens() & (torch.arange(B) != 1)[:, None],
            "aggregate": "seq_mean_token_sum",
            "count_empty": True,
        },
        "kl clamp": lambda: {**reference(), "kl": "low_var", "kl_clamp": (0.1, 0.1)},
        "kl importance": lambda: {**reference(), "kl_importance": True},
        "entropy bonus": lambda: {"entropy": entropy(), "entropy_coef": 0.1},
        "entropy summed": lambda: {"entropy": entropy(), "entropy_coef": 0.1, "entropy_aggregate": "token_sum"},
        "correction": lambda: {**rollout(), "correction": rlk.Correction(high=1.1)},
        "rejection": lambda: {**rollout(), "rejection": rlk.Rejection(high=1.1)},
        "refused: an option of another kind": lambda: {"dro_beta": 0.1},
    }


def policy_loss(s: Size) -> Table:
    """Every kind and option, packed batches, long sequences."""
    B, T = s.B, s.T

    def base(b: int = B, t: int = T) -> Given:
        return {
            "logprob": logprobs(b, t, seed=1),
            "old_logprob": logprobs(b, t, seed=2),
            "advantages": draw(b, t, seed=3),
            "kind": "ppo",
        }

    def packed() -> Given:
        return {k: x.flatten() if isinstance(x, Tensor) else x for k, x in base().items()}

    found = changed(base, losses(s, lambda: draw(B, T, seed=5).abs())) | {
        "packed": lambda: {**packed(), "cu_seqlens": starts(*[T] * B), "kind": "grpo"},
        "packed, sequence level": lambda: {**packed(), "cu_seqlens": starts(*[T] * B), "kind": "gspo"},
        "a bag of tokens": packed,
        "an advantage per sequence": lambda: {**base(), "advantages": draw(B, seed=3)},
        "bfloat16": lambda: {k: x.bfloat16() if isinstance(x, Tensor) else x for k, x in base().items()},
    }
    for kind in ("grpo", "gspo", "dapo"):
        found |= larger(s, f"8 x 128 {kind}", lambda k=kind: {**base(8, 128), "kind": k})
        found |= larger(
            s, f"16 x 4096 {kind}", lambda k=kind: {**base(16, 4096), "kind": k, "mask": ids(16, 4096, below=4) > 0}
        )
    return found


def linear_policy_loss(s: Size) -> Table:
    """The loss's options on a head; few kinds, as what follows the log-probability is policy_loss's."""
    B, T = s.B, s.T
    some = {
        *("kind grpo", "kind gspo", "kind dro", "kl k3", "kl low_var+", "on policy", "mask", "entropy bonus"),
        *("correction", "rejection", "sequence level", "horizon"),
    }

    def base() -> Given:
        return {
            "hidden": draw(B, T, s.D, seed=4, std=0.05),
            "weight": draw(s.V, s.D, seed=1),
            "ids": ids(B, T, below=s.V),
            "old_logprob": logprobs(B, T, seed=2) - math.log(s.V),
            "advantages": draw(B, T, seed=3),
            "kind": "ppo",
        }

    def packed() -> Given:
        return {k: x.flatten(0, 1) if k not in {"weight", "kind"} else x for k, x in base().items()}

    shared = {name: change for name, change in losses(s, lambda: True).items() if name in some}
    shared |= {
        "bias": lambda: {"bias": draw(s.V, seed=9)},
        "scale, cap and temperature": lambda: {"logit_scale": 0.5, "softcap": 2.0, "temperature": 0.7},
        "temperature per token": lambda: {"temperature": torch.linspace(0.5, 2.0, B)[:, None].expand(B, T)},
        "support": lambda: {"support": s.support(B * T)},
        "bfloat16": lambda: {
            "hidden": draw(B, T, s.D, seed=4, std=0.05, dtype=torch.bfloat16),
            "weight": draw(s.V, s.D, seed=1, dtype=torch.bfloat16),
        },
    }
    return changed(base, shared) | {"packed": lambda: {**packed(), "cu_seqlens": starts(*[T] * B)}}
