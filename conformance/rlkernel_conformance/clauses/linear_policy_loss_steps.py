"""Training steps for the attacks on linear_policy_loss@1: a small head with a batch behind it, and its definition.

Log-ratios are multiples of 1/32, those to the reference odd multiples of 1/64: no ratio comes near a bound, so that
whether a token is clipped or rejected does not depend on the rounding of a log-probability.

Legend: B sequences · T padded length · D hidden · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance.clauses.linear_logprob_heads import (
    OPERANDS,
    TEMPERATURES,
    Head,
    check_gradients,
    definition,
    operand_gradients,
    sizes,
    with_leaves,
)
from rlkernel_conformance.clauses.policy_loss_batches import (
    ARRAYS,
    CORRECTIONS,
    REJECTIONS,
    Batch,
    claimed,
    kind_levels,
    takes,
)
from rlkernel_conformance.compare import plain, require
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import policy_loss as oracle
from rlkernel_core.spec.policy_loss import KINDS, LossResult

# Divergences whose bounds a small head does not reach: a probability near one would decide by its rounding.
WIDE: Final = {"dppo_tv": {"clip": (0.9, 0.9)}, "dppo_kl": {"clip": (0.9, 0.9)}}
# What a step may ask for besides what its batch and its head say, and the features that this needs.
OPTIONS: Final[Mapping[str, frozenset[str]]] = {
    "dual_clip": frozenset({"dual_clip"}),
    "count_empty": frozenset({"count_empty", "mask", "aggregate:seq_mean_token_mean"}),
    "entropy_aggregate": frozenset({"entropy", "entropy_aggregate"}),
    "per_row_temperature": frozenset({"per_row_temperature"}),
    "mixed_dtypes": frozenset({"mixed_dtypes"}),
}
FINENESS: Final = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Step:
    """One batch, one head, and the way the loss is called."""

    batch: Batch
    head: Head  # N is B * T
    option: str = ""  # a name of OPTIONS

    def dtype(self, subject: Subject) -> str:
        """The coarser dtype of the operands, whose tolerances count."""
        return min(self.head.dtype, self._other(subject), key=FINENESS.index)

    def _other(self, subject: Subject) -> str:
        """The dtype of weight."""
        others = (d for d in subject.dtypes if self.option == "mixed_dtypes" and d != self.head.dtype)
        return next(others, self.head.dtype)

    def operands(self, subject: Subject) -> dict[str, Any]:
        """Arguments of the head: hidden [N, D], ids [N], temperature a number or [N]."""
        out = self.head.given(subject)
        out["weight"] = replace(self.head, dtype=self._other(subject)).given(subject)["weight"]
        if self.option == "per_row_temperature":
            rows = torch.arange(self.head.N, device=subject.device)
            out["temperature"] = self.head.temperature * (1 + (rows % 3) / 4)
        return out

    def arrays(self, given: dict[str, Any]) -> dict[str, Any]:
        """Arrays of the batch around the head's own log-probabilities; float64, [B, T]."""
        b = self.batch
        shape = (b.B, b.T)
        law = definition(given)
        x = b.arrays()
        g = np.random.default_rng(b.seed + 1)
        lp = law.logprob.reshape(shape)

        def beside(x: Any, gap: Any) -> Any:
            return np.where(x + gap > 0, x - gap, x + gap)  # no log-probability is above 0

        old = beside(lp, -g.integers(-14, 15, shape) / 32)
        gaps = {
            "old": old,
            "ref": beside(lp, -(2 * g.integers(-24, 24, shape) + 1) / 64),
            "roll": beside(old, g.integers(-14, 15, shape) / 32),
        }
        if b.on_policy:
            gaps["roll"] = beside(lp, g.integers(-14, 15, shape) / 32)
        return {**x, **gaps, "lp": lp, "entropy": law.entropy.reshape(shape)}

    def given(self, subject: Subject, **change: Any) -> dict[str, Any]:
        """Arguments of the operator; `change` holds arrays of the batch and arguments by name."""
        b = self.batch
        head = self.operands(subject)
        x = self.arrays(head) | {k: v for k, v in change.items() if k in ARRAYS and not isinstance(v, Tensor)}
        wide = torch.float64 if self.head.dtype == "float64" else torch.float32

        def tensor(a: Any) -> Tensor:
            a = np.asarray(a)
            kind = torch.bool if a.dtype == bool else wide
            flat = b.packed and a.ndim == 2
            return torch.tensor(a.reshape(-1) if flat else a, dtype=kind).to(subject.device)

        if not b.packed:
            head["hidden"] = head["hidden"].reshape(b.B, b.T, -1)
            head["ids"] = head["ids"].reshape(b.B, b.T)
            if self.option == "per_row_temperature":
                head["temperature"] = head["temperature"].reshape(b.B, b.T)
        out = {**head, "old_logprob": None if b.on_policy else tensor(x["old"])}
        out["advantages"] = tensor(x["adv"])[:, None] if b.packed and x["adv"].ndim == 1 else tensor(x["adv"])
        if b.packed:
            out["cu_seqlens"] = torch.arange(b.B + 1, dtype=torch.int32, device=subject.device) * b.T
        if b.masked:
            out["mask"] = tensor(x["mask"])
        if b.kl:
            out["ref_logprob"] = tensor(x["ref"])
        if b.bonus:
            out["entropy"] = True
        if b.rollout or b.correction or b.rejection:
            out["rollout_logprob"] = tensor(x["roll"])
        options = {**b.options(), **self.options()}
        return {**out, **options, **{k: v for k, v in change.items() if k not in ARRAYS or isinstance(v, Tensor)}}

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the loss that are not the batch's."""
        out: dict[str, Any] = dict(WIDE.get(self.batch.kind, {}))
        if self.option == "dual_clip":
            out["dual_clip"] = 1.3
        if self.option == "count_empty":
            out["count_empty"] = True
        if self.option == "entropy_aggregate":
            out["entropy_aggregate"] = "token_sum" if self.batch.aggregate != "token_sum" else "token_mean"
        return out

    def expected(self, subject: Subject, **change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the loss's definition at the head's own log-probabilities."""
        x = self.arrays(self.operands(subject))
        arrays = {**{n: x[n] for n in ARRAYS}, **{k: v for k, v in change.items() if k in ARRAYS}}
        rest = {k: v for k, v in change.items() if k not in ARRAYS}
        return self.batch.definition(**arrays, **self.options(), **rest)

    def dlogits(self, subject: Subject, **change: Any) -> Any:
        """The definition's gradient of the scaled logits, [N, V]."""
        args, named = self.expected(subject, **change)
        g = {"logprob": oracle.gradient(*args, **named).reshape(-1)}
        if self.batch.bonus:
            g["entropy"] = oracle.gradient(*args, of="entropy", **named).reshape(-1)
        return definition(self.operands(subject), g).grad


def run(
    subject: Subject, given: dict[str, Any], frozen: tuple[str, ...] = (), scale: float = 1.0
) -> tuple[LossResult, dict[str, Tensor]]:
    """Result and gradients of the operands, hidden as [N, D]; none where gradients are not claimed."""
    if "grad" not in subject.claims:
        return subject(**given), {}
    call, leaves = with_leaves(given, frozen)
    out = subject(**call)
    grads = dict(zip(leaves, torch.autograd.grad(out.loss * scale, list(leaves.values())), strict=True))
    if "hidden" in grads:
        grads["hidden"] = grads["hidden"].reshape(-1, grads["hidden"].shape[-1])
    return out, grads


def size_of(step: Step, subject: Subject, **change: Any) -> float:
    """The sum of |omega A| and of the terms of the loss: what an error of log p is multiplied by."""
    args, named = step.expected(subject, **change)
    found = oracle.evaluate(*args, **named)
    adv = np.asarray(args[2])
    most = float(np.abs(adv).max(initial=0.0))
    return found.size + sum(abs(t.omega) * max(t.rho, 1.0) * most for t in found.tokens.values())


def check_loss(subject: Subject, step: Step, loss: Tensor, **change: Any) -> None:
    """The loss is the definition's, but for errors of log p."""
    args, named = step.expected(subject, **change)
    want = oracle.loss(*args, **named)
    atol, rtol = subject.tolerance("loss", step.dtype(subject))
    have = plain(loss, "loss").item()
    bound = (atol + rtol) * (1 + 4 * size_of(step, subject, **change))
    error = abs(have - want) / bound
    subject.measures["loss"] = max(error, subject.measures.get("loss", 0.0))
    require(error <= 1, f"the loss is {have!r}, expected {want!r}: {error:.3g} times the tolerance")


def check_operands(
    subject: Subject, step: Step, grads: dict[str, Tensor], *, scale: float = 1.0, **change: Any
) -> None:
    """The gradients of the operands are the definition's."""
    given, dz = step.operands(subject), scale * step.dlogits(subject, **change)
    weight = plain(given["weight"], "weight")
    row = float(np.linalg.norm(weight)) / len(weight) ** 0.5  # of the head
    size = 0.02 * abs(scale) * size_of(step, subject, **change) * row / step.head.temperature
    check_gradients(subject, grads, operand_gradients(given, dz), step.dtype(subject), sizes(given, dz, size))


def check_factor(once: dict[str, Tensor], scaled: dict[str, Tensor], scale: float) -> None:
    """Gradients of many elements, scaled, are `scale` times those that are not, in the mean.

    What each element rounds falls out of the mean; an upstream gradient that was itself rounded to 16 bits does not.
    Four roundings of a relative variance of u^2 / 6 or less leave 0.8 u times `spread`, of which five are allowed.
    """
    for name, x in once.items():
        unscaled = plain(x, f"d_{name}")
        squares = np.square(unscaled)
        factor = float((plain(scaled[name], f"d_{name}") * unscaled).sum() / squares.sum())
        spread = float(np.linalg.norm(squares) / squares.sum())
        allowed = 4 * torch.finfo(x.dtype).eps / 2 * spread
        text = f"d_{name} of {scale} times the loss is {factor:.5f} times d_{name}"
        require(abs(factor / scale - 1) <= allowed, text)


def steps(subject: Subject, *, plainly: bool = False, **fixed: Any) -> st.SearchStrategy[Step]:
    """Steps of everything that is claimed; plainly: without further terms. `fixed` holds fields of batch or head."""
    names = set(OPERANDS) & subject.claims

    def some(feature: str, values: tuple[Any, ...]) -> st.SearchStrategy[Any]:
        return st.sampled_from(values if feature in subject.claims and not plainly else values[:1])

    kinds = [(k, at) for k, at in kind_levels(subject) if fixed.get("kind", k) == k and fixed.get("level", at) == at]
    fields: dict[str, Any] = {
        "B": st.integers(1, 3),
        "T": st.integers(1, 4),
        "seed": st.integers(0, 2**20),
        "D": st.integers(1, 8),
        "V": st.sampled_from((2, 7, 33, 127)),
        "dtype": st.sampled_from(subject.dtypes),
        "aggregate": st.sampled_from(claimed(subject, "aggregate:")),
        "per_token": st.booleans(),
        "masked": st.booleans() if "mask" in subject.claims else st.just(False),
        "packed": some("packed", (False, True)),
        "on_policy": some("on_policy", (False, True)),
        "kl": st.sampled_from(["", *([] if plainly else claimed(subject, "kl:"))]),
        "kl_importance": some("kl_importance", (False, True)),
        "bonus": some("entropy", (False, True)),
        "correction": some("correction", ("", *CORRECTIONS)),
        "rejection": some("rejection", ("", *REJECTIONS)),
        "temperature": st.sampled_from(TEMPERATURES),
        "bias": st.booleans() if "bias" in names else st.just(False),
        "softcap": some("softcap", (0.0, 5.0)),
        "logit_scale": some("logit_scale", (1.0, 0.5, 2.0)),
        "rank": some("lora", (0, 0, 3)),
        "option": st.just("")
        if plainly
        else st.sampled_from(("", *(o for o, f in OPTIONS.items() if f <= subject.claims))),
    }
    fields |= {k: st.just(v) for k, v in fixed.items() if k not in {"kind", "level"}}
    of_head = ("seed", "D", "V", "dtype", "temperature", "bias", "softcap", "logit_scale", "rank")

    def build(kind: tuple[str, str], **values: Any) -> Step:
        option, head = values.pop("option"), {n: values[n] for n in of_head}
        rest = {n: v for n, v in values.items() if n not in of_head or n in {"seed", "dtype"}}
        rest["kl_importance"] = bool(rest["kl"]) and rest["kl_importance"]
        if not takes(kind[0], rest["correction"]):
            rest["correction"] = ""
        step = Step(Batch(kind=kind[0], level=kind[1], **rest), Head(N=rest["B"] * rest["T"], **head), option)
        return _asking(step)

    return st.builds(build, st.sampled_from(kinds), **fields)


def _asking(step: Step) -> Step:
    """The step with what its option needs of it, or without the option where its kind has none."""
    if step.option == "dual_clip" and KINDS[step.batch.kind].surrogate != "clip":
        return replace(step, option="")
    if step.option == "count_empty":
        return replace(step, batch=replace(step.batch, aggregate="seq_mean_token_mean", masked=True))
    return replace(step, batch=replace(step.batch, bonus=True)) if step.option == "entropy_aggregate" else step


def one_of_each() -> tuple[Step, ...]:
    """A step of every option, for an attack to try before it draws."""
    batch, heads = Batch(B=3, T=4, seed=5, masked=False, per_token=True), dict.fromkeys(OPTIONS, "float32")
    heads["mixed_dtypes"] = "bfloat16"  # beside a weight of 32 bits, which must not be rounded to it
    return tuple(_asking(Step(batch, Head(12, 6, 33, 5, dtype), option)) for option, dtype in heads.items())


def where_claimed(prop: Callable[[Subject, Step], None]) -> Callable[[Subject, Step], None]:
    """Carry out the property in a claimed dtype, where kind, aggregation and option are claimed."""

    @wraps(prop)
    def fitting(subject: Subject, case: Step) -> None:
        b = case.batch
        claims = {f"kind:{b.kind}", f"aggregate:{b.aggregate}"} | OPTIONS.get(case.option, frozenset())
        if case.head.dtype not in subject.dtypes:
            case = replace(case, head=replace(case.head, dtype=subject.dtypes[0]))
        if claims <= subject.claims:
            prop(subject, case)

    return fitting
