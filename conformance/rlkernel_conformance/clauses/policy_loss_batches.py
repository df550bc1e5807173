"""Batches for the attacks on policy_loss@1, and the calls that operator and oracle both understand.

Log-probabilities lie on a grid of 1/128 above -2, so that every dtype holds them and their differences exactly, and
no ratio falls on a bound: whether a token is clipped or rejected does not depend on rounding.

Legend: B sequences · T padded length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.compare import close, plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import policy_loss as oracle
from rlkernel_core.spec.policy_loss import KINDS, Correction, LossResult, Rejection

CORRECTIONS: Final[Mapping[str, Correction]] = {
    "truncated tokens": Correction("token", "truncate", high=1.2),
    "masked tokens": Correction("token", "mask", low=0.7, high=1.4),
    "truncated sequences": Correction("sequence", "truncate", low=0.8, high=1.3),
    "masked sequences": Correction("sequence", "mask", high=1.5),
    "truncated means": Correction("geometric", "truncate", high=1.12),
    "normalized tokens": Correction("token", "truncate", high=1.2, normalize=True),
    "normalized sequences": Correction("sequence", "truncate", low=0.2, high=2.0, normalize=True),
}
REJECTIONS: Final[Mapping[str, Rejection]] = {
    "k1 tokens": Rejection("k1", "token", low=0.7, high=1.3),
    "k1 sequences": Rejection("k1", "sequence", low=0.5, high=1.6),
    "k1 means": Rejection("k1", "geometric", low=0.91, high=1.12),
    "k1 veto": Rejection("k1", "any", low=0.55),
    "k2 tokens": Rejection("k2", "token", high=0.05),
    "k3 means": Rejection("k3", "geometric", high=0.08),
    "k3 veto": Rejection("k3", "any", high=0.2),
}
# What a kind must be given, and bounds that bite where the published ones lie below the grid.
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "gspo": {"clip": (0.1, 0.12)},
    "gspo_token": {"clip": (0.1, 0.12)},
    "luspo": {"clip": (0.1, 0.12)},
    "dppo_tv": {"clip": (0.06, 0.05)},
    "dppo_kl": {"clip": (0.01, 0.012)},
    "dro": {"dro_beta": 0.7},
}


@dataclass(frozen=True)
class Batch:
    """One batch and the way it is called."""

    B: int
    T: int
    seed: int
    kind: str = "ppo"
    level: str = "token"
    aggregate: str = "token_mean"
    dtype: str = "float64"
    spread: float = 0.4  # of the log-ratios
    per_token: bool = False  # advantages
    masked: bool = True
    packed: bool = False
    on_policy: bool = False  # old_logprob=None
    kl: str = ""  # "": no reference policy
    kl_importance: bool = False
    bonus: bool = False  # entropy
    rollout: bool = False
    correction: str = ""
    rejection: str = ""

    def arrays(self) -> dict[str, Any]:
        """lp, old, ref, roll, entropy [B, T], mask [B, T] bool, adv [B] or [B, T]: float64 on the grid."""
        g = np.random.default_rng(self.seed)
        shape = (self.B, self.T)

        def near(x: Any, spread: float, odd: int) -> Any:
            return (np.clip(np.round(64 * (x + spread * g.standard_normal(shape))), -125, -1) * 2 + odd) / 128

        lp = -g.integers(1, 121, shape) / 64
        mask = g.random(shape) < 0.75 if self.masked else np.ones(shape, bool)
        mask[:, :1] = True
        if self.masked and self.B > 1:
            mask[1] = self.seed % 3 != 0 and mask[1]  # every third batch has an empty sequence
        return {
            "lp": lp,
            "old": near(lp, self.spread, 0),
            "ref": near(lp, 0.5, 1),
            "roll": near(lp, 0.4, 1),
            "entropy": g.integers(0, 128, shape) / 64,
            "adv": (g.integers(-32, 32, shape if self.per_token else shape[:1]) * 2 + 1) / 32,
            "mask": mask,
        }

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the operator that are no tensors."""
        out: dict[str, Any] = {"kind": self.kind, "aggregate": self.aggregate, **OPTIONS.get(self.kind, {})}
        out |= {"level": "sequence"} if self.level == "sequence" else {}
        if self.aggregate == "seq_mean_token_sum_norm":
            out["horizon"] = 7.0
        if self.kl:
            out |= {"kl": self.kl, "kl_coef": 0.25, "kl_importance": self.kl_importance}
            out |= {"kl_clamp": (0.6, 0.15)} if self.kl.startswith("low_var") else {}
        if self.bonus:
            out["entropy_coef"] = 0.125
        if self.correction:
            out["correction"] = CORRECTIONS[self.correction]
        if self.rejection:
            out["rejection"] = REJECTIONS[self.rejection]
        return out

    def definition(self, **change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the oracle."""
        x, given = self.arrays() | {k: v for k, v in change.items() if k in ARRAYS}, self.options()
        given |= {k: v for k, v in change.items() if k not in ARRAYS}
        what = KINDS[given.pop("kind")]
        given = {**what.options, **given}
        limit = given.pop("log_ratio_limit", np.inf)
        named = {
            "surrogate": what.surrogate,
            "level": given.pop("level", None) or what.levels[0],
            "own": what.own_gradient,
            "limit": np.inf if limit is None else limit,
            "ref": x["ref"] if self.kl else None,
            "entropy": x["entropy"] if self.bonus else None,
            "roll": x["roll"] if self.rollout or self.correction or self.rejection else None,
            **{k: v for k, v in given.items() if v is not None},
        }
        return (x["lp"], None if self.on_policy else x["old"], x["adv"], x["mask"]), named


ARRAYS: Final = ("lp", "old", "ref", "roll", "entropy", "adv", "mask")


@dataclass(frozen=True)
class Found:
    """What a call gave, gradients in the padded layout."""

    result: LossResult
    dlogprob: Any = None  # [B, T]
    dentropy: Any = None


def arguments(
    subject: Subject, case: Batch, *, dtype: str | None = None, tail: int = 0, **change: Any
) -> dict[str, Any]:
    """All arguments of a call by name.

    Args:
        subject: on whose device.
        case: the batch.
        dtype: another than that of the case.
        tail: tokens of no sequence at the end of a packed batch; they hold NaN.
        **change: arrays by name and options in place of those of the case.
    """
    x = case.arrays() | {k: v for k, v in change.items() if k in ARRAYS}
    B, T = x["lp"].shape

    def tensor(a: Any, fill: float = np.nan) -> Tensor:
        a = np.asarray(a)
        if case.packed and a.ndim == 2:
            a = np.concatenate([a.reshape(-1), np.full(tail, fill).astype(a.dtype)])
        kind = torch.bool if a.dtype == bool else getattr(torch, dtype or case.dtype)
        return torch.tensor(a, dtype=kind).to(subject.device)

    out = {"logprob": tensor(x["lp"]), "old_logprob": None if case.on_policy else tensor(x["old"])}
    out["advantages"] = tensor(x["adv"])[:, None] if case.packed and x["adv"].ndim == 1 else tensor(x["adv"])
    if case.packed:
        out["cu_seqlens"] = torch.arange(B + 1, dtype=torch.int32, device=subject.device) * T
    if case.masked:
        out["mask"] = tensor(x["mask"], fill=1.0)
    if case.kl:
        out["ref_logprob"] = tensor(x["ref"])
    if case.bonus:
        out["entropy"] = tensor(x["entropy"])
    if case.rollout or case.correction or case.rejection:
        out["rollout_logprob"] = tensor(x["roll"])
    return {**out, **case.options(), **{k: v for k, v in change.items() if k not in ARRAYS}}


def call(subject: Subject, case: Batch, *, grad: bool | None = None, **change: Any) -> Found:
    """The subject's answer, with the gradients of logprob and of entropy where claimed; `change` as in arguments."""
    grad = "grad" in subject.claims if grad is None else grad
    given = arguments(subject, case, **change)
    leaves = [given[n].requires_grad_(grad) for n in ("logprob", "entropy") if n in given]
    result = subject(**given)
    if not grad:
        return Found(result)
    B, T = case.B, case.T
    shaped = []
    for g in torch.autograd.grad(result.loss, leaves):
        values = plain(g, "gradient").reshape(-1)
        require(not values[B * T :].any(), "a token of no sequence has a gradient")
        shaped.append(values[: B * T].reshape(B, T))
    return Found(result, *shaped)


def check_loss(subject: Subject, case: Batch, found: Found, **change: Any) -> None:
    """The loss is the definition's."""
    want = expected(case, **change)
    atol, rtol = subject.tolerance("loss", case.dtype)
    close(subject, "loss", found.result.loss, want.value, case.dtype, scale=1 + rtol / atol * want.size)


def check_gradient(subject: Subject, case: Batch, found: Found, **change: Any) -> None:
    """The gradients of logprob and entropy are the definition's."""
    pairs = [("grad_logprob", "lp", found.dlogprob)]
    pairs += [("grad_entropy", "entropy", found.dentropy)] if case.bonus else []
    for name, of, have in pairs:
        want = expected_gradient(case, of, **change)
        atol, rtol = subject.tolerance(name, case.dtype)
        scale = 1 + rtol / atol * np.abs(want).max(initial=0.0)  # terms of either sign may cancel in one token
        close(subject, name, torch.from_numpy(have), want, case.dtype, scale=scale)


def judged(subject: Subject, case: Batch, found: Found | None = None, **change: Any) -> Found:
    """A call, its loss and its gradients the definition's; `found` is judged in place of a call."""
    found = found or call(subject, case, **change)
    check_loss(subject, case, found, **change)
    if found.dlogprob is not None:
        check_gradient(subject, case, found, **change)
    return found


def expected_gradient(case: Batch, of: str = "lp", **change: Any) -> Any:
    """The definition's gradient, [B, T]."""
    args, named = case.definition(**change)
    return oracle.gradient(*args, of=of, **named)


def expected(case: Batch, **change: Any) -> oracle.Loss:
    """The definition's loss, token by token."""
    args, named = case.definition(**change)
    return oracle.evaluate(*args, **named)


def takes(kind: str, correction: str) -> bool:
    """Whether a kind has a meaning for a correction."""
    rule = CORRECTIONS.get(correction)
    if rule is None:
        return True
    if kind == "vespo":
        return rule.level == "token" and not rule.normalize
    return kind != "gmpo" or rule.level != "token"


def claimed(subject: Subject, prefix: str) -> list[str]:
    """The variants of a family that are claimed: "kind:" gives kinds."""
    return [
        f.name.removeprefix(prefix)
        for f in subject.spec.features
        if f.name in subject.claims and f.name.startswith(prefix)
    ]


def kind_levels(subject: Subject) -> list[tuple[str, str]]:
    """Claimed kinds at the levels that are claimed."""
    fine = {"token", "sequence"} if "level:sequence" in subject.claims else {"token"}
    return [(k, level) for k in claimed(subject, "kind:") for level in KINDS[k].levels if level in fine]


def batches(subject: Subject, *, plainly: bool = False, **fixed: Any) -> st.SearchStrategy[Batch]:
    """Batches of everything that is claimed.

    Args:
        subject: whose claims shape the draws.
        plainly: no KL, bonus, rollout or packing unless fixed.
        **fixed: fields that are given.
    """

    def has(feature: str) -> st.SearchStrategy[bool]:
        return st.booleans() if feature in subject.claims and not plainly else st.just(False)

    def names(feature: str, table: Any) -> st.SearchStrategy[str]:
        return st.sampled_from(["", *table]) if feature in subject.claims and not plainly else st.just("")

    kinds = [(k, level) for k, level in kind_levels(subject) if fixed.get("kind", k) == k]
    kinds = [(k, level) for k, level in kinds if fixed.get("level", level) == level]
    kls = [] if plainly else claimed(subject, "kl:")
    fields: dict[str, Any] = {
        "B": st.integers(1, 4),
        "T": st.integers(1, 6),
        "seed": st.integers(0, 2**20),
        "aggregate": st.sampled_from(claimed(subject, "aggregate:")),
        "dtype": st.sampled_from(subject.dtypes),
        "per_token": st.booleans(),
        "masked": st.booleans() if "mask" in subject.claims else st.just(False),
        "packed": has("packed"),
        "on_policy": has("on_policy"),
        "kl": st.sampled_from(["", *kls]),
        "kl_importance": has("kl_importance"),
        "bonus": has("entropy"),
        "correction": names("correction", CORRECTIONS) if "rollout" in subject.claims else st.just(""),
        "rejection": names("rejection", REJECTIONS) if "rollout" in subject.claims else st.just(""),
    }
    fields |= {k: st.just(v) for k, v in fixed.items() if k not in {"kind", "level"}}

    def build(kind: tuple[str, str], **values: Any) -> Batch:
        values["kl_importance"] = bool(values["kl"]) and values["kl_importance"]
        if not takes(kind[0], values["correction"]):
            values["correction"] = ""
        return Batch(kind=kind[0], level=kind[1], **values)

    return st.builds(build, st.sampled_from(kinds), **fields) if kinds else st.nothing()
