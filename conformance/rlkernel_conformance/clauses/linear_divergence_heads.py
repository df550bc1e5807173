"""Heads that linear_divergence@1 is attacked with, and the float64 definition of their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.clauses.divergence_rows import TEMPERATURES, allowed, definition_of, kinds, listed
from rlkernel_conformance.clauses.linear_logprob_heads import check_gradients, operand_gradients, sizes
from rlkernel_conformance.compare import plain, within
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import divergence as definition

SIZES: Final = (1, 2, 3, 7, 33, 127, 1000, 1031)
OPERANDS: Final = ("hidden", "weight")
WIDE: Final = 256  # a row of logits in fp32 is 1024 bytes: one that is kept per row of hidden shows
FORMS: Final = {"head": "teacher_weight", "logits": "", "list": "teacher_ids"}  # of a teacher, and their features


@dataclass(frozen=True)
class Heads:
    """Hidden states [N, D] and a head [V, D] whose logits have a standard deviation of about 2; a teacher [N, E]."""

    N: int
    D: int
    V: int
    seed: int
    kind: str = "forward_kl"
    beta: float | None = None
    dtype: str = "float32"
    temperature: float = 1.0
    form: str = "head"
    E: int = 5
    K: int = 4

    def given(self, subject: Subject) -> dict[str, Any]:
        """Arguments of the call."""
        kind = getattr(torch, self.dtype)

        def side(D: int, salt: int) -> tuple[Tensor, Tensor]:
            hidden = draw.normal((self.N, D), self.seed + salt, subject.device).to(kind)
            weight = 2 / D**0.5 * draw.normal((self.V, D), self.seed + salt + 1, subject.device)
            return hidden, weight.to(kind)

        (hidden, weight), (teacher, head) = side(self.D, 0), side(self.E, 10)
        out: dict[str, Any] = {
            "hidden": hidden, "weight": weight, "teacher": teacher, "kind": self.kind, "temperature": self.temperature,
        }  # fmt: skip
        if self.kind == "jsd" and self.beta is not None:
            out["beta"] = self.beta
        if self.form == "head" and FORMS["head"] in subject.claims:
            return out | {"teacher_weight": head}
        out["teacher"] = (teacher.double() @ head.double().T).to(kind)
        if self.form == "list" and FORMS["list"] in subject.claims:
            return out | listed(out["teacher"], min(self.K, self.V))
        return out


def of_logits(given: Mapping[str, Any]) -> dict[str, Any]:
    """The call of divergence that this one is, in float64."""
    left = ("hidden", "weight", "teacher_weight")
    out = {n: x for n, x in given.items() if n not in left}
    out["logits"] = given["hidden"].detach().double() @ given["weight"].detach().double().T
    if given.get("teacher_weight") is not None:
        out["teacher"] = given["teacher"].double() @ given["teacher_weight"].double().T
    return out


def dtype_of(given: Mapping[str, Any]) -> str:
    """Of the student, by which tolerances go."""
    return str(given["hidden"].dtype).removeprefix("torch.")


def judged(subject: Subject, given: dict[str, Any]) -> Tensor:
    """The result of a call, within tolerance of the definition."""
    out: Tensor = subject(**given)
    want = definition_of(of_logits(given))
    within(subject, "divergence", out, want.values, allowed(subject, dtype_of(given), want))
    return out


def agree(subject: Subject, given: dict[str, Any], other: dict[str, Any]) -> None:
    """Two calls give the same, within the tolerance of the first."""
    bound = 2 * allowed(subject, dtype_of(given), definition_of(of_logits(given))) + 1e-5
    within(subject, "divergence", subject(**other), plain(subject(**given), "divergence"), bound)


def with_leaves(
    subject: Subject, given: Mapping[str, Any], frozen: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The call with operands that require gradients where they are claimed, and these operands."""
    if "grad" not in subject.claims:
        return dict(given), {}
    leaves = {n: given[n].detach().clone().requires_grad_() for n in OPERANDS if n not in frozen}
    return {**given, **leaves}, leaves


def back(
    subject: Subject, given: Mapping[str, Any], g: Tensor | None = None, frozen: tuple[str, ...] = ()
) -> tuple[Tensor, dict[str, Tensor]]:
    """Result and gradients of the operands."""
    call, leaves = with_leaves(subject, given, frozen)
    out = subject(**call)
    if not leaves:
        return out, {}
    up = torch.ones_like(out) if g is None else g.to(out.dtype)
    return out.detach(), dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), up), strict=True))


def scaled(given: Mapping[str, Any]) -> dict[str, Any]:
    """The operands, as the checks of heads take them."""
    return {**{n: given[n].detach() for n in OPERANDS}, "logit_scale": 1.0}


def least_of(given: Mapping[str, Any], g: Any) -> float:
    """A norm that a gradient has where probabilities are neither 0 nor 1; below it errors are those of rounding."""
    weight = plain(given["weight"], "weight")
    return 0.05 * float(np.linalg.norm(g)) * float(np.linalg.norm(weight)) / len(weight) ** 0.5 / given["temperature"]


def check(subject: Subject, given: Mapping[str, Any], found: Mapping[str, Tensor], g: Any) -> None:
    """Gradients are the definition's, in all."""
    rows: definition.Rows = definition_of(of_logits(given), g)
    most = sizes(scaled(given), np.abs(rows.grad) + 1e3 * rows.slack, least_of(given, g))
    check_gradients(subject, found, operand_gradients(scaled(given), rows.grad), dtype_of(given), most)


def cases(subject: Subject) -> st.SearchStrategy[Heads]:
    """Heads of every claimed dtype and kind, and every form of teacher."""
    return st.builds(
        Heads,
        N=st.integers(1, 5),
        D=st.integers(1, 16),
        V=st.sampled_from(SIZES),
        seed=st.integers(0, 2**20),
        kind=st.sampled_from(kinds(subject)),
        beta=st.sampled_from((None, 0.1, 0.9)),
        dtype=st.sampled_from(subject.dtypes),
        temperature=st.sampled_from(TEMPERATURES),
        form=st.sampled_from([form for form, f in FORMS.items() if not f or f in subject.claims]),
        E=st.integers(1, 16),
        K=st.sampled_from((1, 5, 64)),
    )


def plainly(**fixed: Any) -> Callable[[Subject], st.SearchStrategy[Heads]]:
    """Heads of the first claimed dtype and a vocabulary that is cheap: for laws that compare two calls."""
    return lambda s: cases(s).map(lambda c: replace(c, **{"dtype": s.dtypes[0], "V": min(c.V, 127), **fixed}))
