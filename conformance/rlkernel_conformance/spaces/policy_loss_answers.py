"""What the definition says of calls of policy_loss@1: loss, statistics, gradients, and what their errors may be.

Legend: B sequences · T padded length · N packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.spaces.space import Given, Point, Want
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import policy_loss as definition
from rlkernel_core.spec.policy_loss import KINDS


@dataclass(frozen=True)
class Expected:
    """What the definition says of one loss."""

    loss: definition.Loss
    stats: dict[str, float]
    gradients: dict[str, Any]  # [B, T] by "lp" and "entropy"
    sizes: dict[str, Any]  # [B, T] what an error of a gradient is relative to
    scales: dict[str, float] = field(default_factory=dict)  # what an error of a statistic is relative to


class Calls:
    """The numbers of a call as the definition takes them, and its results as the call has them."""

    def __init__(self, given: Given, copies: tuple[int, int]) -> None:
        self.given, self.copies = given, copies
        first = given["logprob"]
        self.shape = tuple(first.shape)
        if len(self.shape) == 2:
            B, T = self.shape
            self.at = np.arange(B * T).reshape(B, T)
            self.inside = np.ones((B, T), bool)
        else:
            cu = given["cu_seqlens"].tolist() if "cu_seqlens" in given else [0, self.shape[0]]
            length = np.diff(cu)
            span = np.arange(length.max(initial=0))
            self.inside = span < length[:, None]
            self.at = np.where(self.inside, np.array(cu[:-1], int)[:, None] + span, 0)
        rows, tokens = copies
        self.period = (slice(self.at.shape[0] // rows), slice(self.at.shape[1] // tokens))

    def tokens(self, name: str) -> Any:
        """[B, T] of one copy."""
        x = self.given[name].cpu()
        flat = (x if x.dtype == torch.bool else x.double()).numpy().reshape(-1)
        return flat[self.at[self.period]] if flat.size else np.zeros(self.inside[self.period].shape, flat.dtype)

    def stored(self, values: Any, fill: float = 0.0) -> Any:
        """Numbers [B, T] of one copy as a result of the call has them."""
        flat = np.full(math.prod(self.shape), fill)
        flat[self.at[self.inside]] = np.tile(values, self.copies)[self.inside]
        return flat.reshape(self.shape)

    def definition(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the definition."""
        given = self.given
        mask = self.inside[self.period] & (self.tokens("mask") if "mask" in given else True)
        adv = given["advantages"]
        of_rows = adv.dim() == 1 if len(self.shape) == 2 else adv.dim() == 2
        if of_rows or tuple(adv.shape) == (self.shape[0], 1) != self.shape:
            A = adv.double().cpu().numpy().reshape(-1)[self.period[0]]
        else:
            A = self.tokens("advantages")
        what = KINDS[given["kind"]]
        named = {**what.options, **{n: given[n] for n in what.options if n in given}}
        limit = named.pop("log_ratio_limit", None)
        for name in ("denominator", "horizon", "count_empty", "kl", "kl_coef", "kl_clamp", "kl_importance"):
            named |= {name: given[name]} if name in given else {}
        for name in ("entropy_coef", "entropy_aggregate", "entropy_denominator", "correction", "rejection"):
            named |= {name: given[name]} if name in given else {}
        named = {n: x.item() if torch.is_tensor(x) else x for n, x in named.items() if x is not None}
        named |= {"surrogate": what.surrogate, "own": what.own_gradient, "aggregate": what.aggregate}
        named |= {"aggregate": given["aggregate"]} if "aggregate" in given else {}
        named |= {"level": given["level"], "limit": math.inf if limit is None else limit}
        named |= {of: self.tokens(n) for n, of in TOKENS.items() if given.get(n) is not None}
        old = named.pop("old", None)
        return (self.tokens("logprob"), old, A, mask), named

    def expected(self, *, gradients: bool) -> Expected:
        """The definition's results."""
        args, named = self.definition()
        with np.errstate(all="ignore"):
            found = definition.evaluate(*args, **named)
            stats = definition.statistics(*args, **named)
        mean_d = max((abs(t.d) for t in found.tokens.values()), default=0.0)
        mean_kl = max((abs(t.kl) for t in found.tokens.values()), default=0.0)
        scales = {"approx_kl_k1": mean_d, "kl_ref": mean_kl, "policy_loss": 10 * found.size / 4}
        if not gradients:
            return Expected(found, stats, {}, {}, scales)
        made = {of: gradient(args, named, of) for of in ("lp", *(["entropy"] if "entropy" in named else []))}
        sizes = {of: size for of, (_, size) in made.items()}
        sizes["lp"] = sizes["lp"] + _importance(args, named, found)
        return Expected(found, stats, {of: g for of, (g, _) in made.items()}, sizes, scales)


TOKENS: Final = {"old_logprob": "old", "ref_logprob": "ref", "rollout_logprob": "roll", "entropy": "entropy"}


def gradient(args: tuple[Any, ...], named: Mapping[str, Any], of: str) -> tuple[Any, Any]:
    """The definition's gradient [B, T], and the sum of the absolute values of its terms."""
    lp, old, adv, mask = args
    h = 1e-30
    out, size = np.zeros(lp.shape), np.zeros(lp.shape)
    for i, t in np.argwhere(mask):
        step = np.zeros(lp.shape, complex)
        step[i, t] = 1j * h
        x, more = (lp + step, named) if of == "lp" else (lp, {**named, "entropy": named["entropy"] + step})
        terms = [complex(part).imag / h for part in definition.evaluate(x, old, adv, mask, **more).parts()]
        out[i, t], size[i, t] = math.fsum(terms), math.fsum(map(abs, terms))
    return out, size


def _importance(args: tuple[Any, ...], named: Mapping[str, Any], found: definition.Loss) -> Any:
    """What the terms of the KL's product with a ratio may come to, which cancel in its gradient, at each token [B, T].

    d(r kl) = r kl + r kl', and |kl'| <= |kl| + |q| + 1 for each estimator.
    """
    lp, size = args[0], np.zeros(args[0].shape)
    if not named.get("kl_importance"):
        return size
    for (i, t), x in found.tokens.items():
        q = float(abs(lp[i, t] - named["ref"][i, t]))
        kl = float(abs(x.kl))
        ratio = abs(x.kl_term) / kl if kl else 1.0
        size[i, t] = abs(x.omega * named["kl_coef"]) * float(ratio) * (2 * kl + q + 1)
    return size.max(1, keepdims=True, initial=0.0) + np.zeros(lp.shape) if named["level"] == "sequence" else size


def copies_of(point: Point) -> tuple[int, int]:
    """How often a batch of a real size holds the same tokens."""
    found: tuple[int, int] = point.levels.get("copies", (1, 1))
    return found


def multiple(given: Given, copies: tuple[int, int]) -> float:
    """The loss of a batch of copies in units of that of one."""
    rows, tokens = copies
    aggregate = given.get("aggregate") or KINDS[given["kind"]].aggregate
    return {"token_mean": 1.0, "seq_mean_token_mean": 1.0, "token_sum": float(rows * tokens)}.get(aggregate, tokens)


def loss_results(
    subject: Subject, dtype: str, given: Given, copies: tuple[int, int], want: Expected
) -> dict[str, Want]:
    """Loss and statistics."""
    rows, tokens = copies
    times, stored = multiple(given, copies), "float64" if dtype == "float64" else "float32"
    atol, rtol = subject.tolerance("loss", dtype)
    scale = 1 + rtol / atol * want.loss.size * times
    found = {
        "loss": Want.near(subject, "loss", dtype, want.loss.value * times, scale=scale, stored=stored),
        "stats.tokens": Want(want.stats["tokens"] * rows * tokens, 0.0, "int64"),
        "stats.sequences": Want(want.stats["sequences"] * rows, 0.0, "int64"),
    }
    if len(given["logprob"].shape) == 1 and "cu_seqlens" not in given:
        del found["stats.sequences"]
    for name, value in want.stats.items():
        if name not in {"tokens", "sequences"}:
            unit = times if name == "policy_loss" else 1.0
            size = 4 * max(1.0, want.scales.get(name, 0.0) * unit)
            if name == "effective_sample_size":  # a squared sum over a sum of squares: three relative errors add up
                of_sums, rtol_of_sums = subject.tolerance("stats", dtype)
                size += 2 * rtol_of_sums / of_sums * value
            found[f"stats.{name}"] = Want.near(subject, "stats", dtype, value * unit, scale=size, stored=stored)
    return found


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """Loss, statistics and the gradients of log-probabilities and entropies."""
    dtype, copies = point["dtype"], copies_of(point)
    call = Calls(given, copies)
    want = call.expected(gradients=bool(upstream))
    found = loss_results(subject, dtype, given, copies, want)
    if not upstream:
        return found
    g = float(upstream["loss"]) * multiple(given, copies) / math.prod(copies)
    for name, of in (("logprob", "lp"), ("entropy", "entropy")):
        if of in want.gradients:
            kind = str(given[name].dtype).removeprefix("torch.")
            atol, rtol = subject.tolerance(f"grad_{name}", dtype)
            if kind != dtype:
                rtol = max(rtol, subject.tolerance(f"grad_{name}", kind)[1])
                atol = max(atol, subject.tolerance(f"grad_{name}", kind)[0])
            size = call.stored(np.abs(g) * want.sizes[of])
            found[f"d_{name}"] = Want(call.stored(g * want.gradients[of]), atol + rtol * size, kind)
    return found
