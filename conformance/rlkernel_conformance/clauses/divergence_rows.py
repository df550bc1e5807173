"""Rows for the attacks on divergence@1 and linear_divergence@1, and what the definition says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.compare import plain, require, within
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import divergence as definition
from rlkernel_core.spec.qmatmul import UNITS, smallest_error

TEMPERATURES: Final = (1.0, 0.5, 0.7, 1.7)
SIZES: Final = (1, 2, 3, 7, 31, 33, 127, 1000, 4099)
BETAS: Final = (None, 0.1, 0.9)
SIDES: Final = ("logits", "teacher")


@dataclass(frozen=True)
class Rows:
    """Logits [N, V] of student and teacher, or a list of K ids of the teacher's."""

    N: int
    V: int
    seed: int
    kind: str = "forward_kl"
    beta: float | None = None
    logits: str = "normal"
    dtype: str = "float32"
    temperature: float = 1.0
    teacher_temperature: float | None = None
    K: int = 0  # 0: no list

    def given(self, subject: Subject) -> dict[str, Any]:
        """Arguments of the call, without what the subject does not claim."""
        x, teacher = (
            draw.logits(self.logits, self.N, self.V, self.seed + i, self.dtype, subject.device) for i in range(2)
        )
        out: dict[str, Any] = {"logits": x, "teacher": teacher, "kind": self.kind, "temperature": self.temperature}
        if self.kind == "jsd" and self.beta is not None:
            out["beta"] = self.beta
        if self.K and "teacher_ids" in subject.claims:
            return out | listed(teacher, min(self.K, self.V))
        if self.teacher_temperature is not None and "teacher_temperature" in subject.claims:
            out["teacher_temperature"] = self.teacher_temperature
        return out


def listed(teacher: Tensor, K: int) -> dict[str, Tensor]:
    """The K most likely ids of teacher logits [N, V], as float64 has their log-probabilities, in fp32 or float64."""
    wide = torch.float64 if teacher.dtype == torch.float64 else torch.float32
    best = torch.log_softmax(teacher.double(), -1).topk(K, -1)
    return {"teacher": best.values.to(wide), "teacher_ids": best.indices}


def dtype_of(given: dict[str, Any]) -> str:
    """Of the logits, by which tolerances go."""
    return str(given["logits"].dtype).removeprefix("torch.")


def definition_of(given: dict[str, Any], g: Any = None) -> definition.Rows:
    """What the definition says of a call of rows [N]."""
    more = {n: given.get(n) for n in ("kind", "beta", "temperature", "teacher_temperature") if given.get(n) is not None}
    more = {n: plain(x, n) if isinstance(x, Tensor) else x for n, x in more.items()}
    ids = plain(given["teacher_ids"], "teacher_ids") if given.get("teacher_ids") is not None else None
    return definition.divergence(
        plain(given["logits"], "logits"), plain(given["teacher"], "teacher"), ids=ids, g=g, **more
    )


def allowed(subject: Subject, dtype: str, want: definition.Rows) -> Any:
    """How far divergences may be from the definition."""
    atol, rtol = subject.tolerance("divergence", dtype)
    return atol * (want.size + 0.01) + rtol * np.abs(np.nan_to_num(want.values, posinf=0, nan=0))


def allowed_gradient(subject: Subject, dtype: str, want: definition.Rows) -> Any:
    """How far gradients may be from the definition."""
    atol, rtol = subject.tolerance("grad", dtype)
    return (
        atol * want.grad_size[:, None]
        + rtol * np.abs(np.nan_to_num(want.grad))
        + want.slack
        + smallest_error(UNITS[dtype])
    )


def judged(subject: Subject, given: dict[str, Any]) -> Tensor:
    """The result of a call, within tolerance of the definition."""
    out: Tensor = subject(**given)
    want, dtype = definition_of(given), dtype_of(given)
    within(subject, "divergence", out, want.values, allowed(subject, dtype, want))
    wide = torch.float64 if dtype == "float64" else torch.float32
    require(out.dtype == wide, f"divergences of {dtype} are {out.dtype}")
    return out


def with_leaf(subject: Subject, given: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """The call with logits that require a gradient where gradients are claimed, and these."""
    leaf = given["logits"].detach().clone().requires_grad_("grad" in subject.claims)
    return {**given, "logits": leaf}, leaf


def gradient(subject: Subject, given: dict[str, Any], g: Tensor | None = None) -> Tensor:
    """Of the logits, for upstream gradients g."""
    call, leaf = with_leaf(subject, given)
    out = subject(**call)
    (found,) = torch.autograd.grad(out, leaf, torch.ones_like(out) if g is None else g.to(out.dtype))
    return found


def kinds(subject: Subject) -> list[str]:
    """Of those that are claimed."""
    return [c.partition(":")[2] for c in sorted(subject.claims) if c.startswith("kind:")]


def cases(subject: Subject) -> st.SearchStrategy[Rows]:
    """Rows of every claimed dtype, kind and distribution, with lists and without."""
    return st.builds(
        Rows,
        N=st.integers(1, 4),
        V=st.sampled_from(SIZES),
        seed=st.integers(0, 2**20),
        kind=st.sampled_from(kinds(subject)),
        beta=st.sampled_from(BETAS),
        logits=st.sampled_from(sorted(draw.LOGITS)),
        dtype=st.sampled_from(subject.dtypes),
        temperature=st.sampled_from(TEMPERATURES),
        teacher_temperature=st.sampled_from((None, *TEMPERATURES)),
        K=st.sampled_from((0, 0, 1, 5, 64)),
    )


def plainly(**fixed: Any) -> Callable[[Subject], st.SearchStrategy[Rows]]:
    """Rows without extremes, in the first claimed dtype: for laws that compare two calls."""

    def some(subject: Subject) -> st.SearchStrategy[Rows]:
        return cases(subject).map(
            lambda c: replace(c, **{"logits": "normal", "dtype": subject.dtypes[0], "V": min(c.V, 127), **fixed})
        )

    return some


def agree(subject: Subject, given: dict[str, Any], other: dict[str, Any]) -> None:
    """Two calls give the same, within the tolerance of the first."""
    want = definition_of(given)
    bound = 2 * allowed(subject, dtype_of(given), want) + 1e-6
    within(subject, "divergence", subject(**other), plain(subject(**given), "divergence"), bound)
