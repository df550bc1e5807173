"""Attacks on glu@1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.call_checks import same_results
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import close, plain, require, same_bits
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.glu import glu, glu_gradient
from rlkernel_core.spec.glu import ACTIVATIONS

WIDTHS = (1, 2, 3, 63, 64, 100, 513, 1030)
SIZES = {"normal": 1.0, "wide": 8.0, "far": 200.0, "small": 2.0**-12}  # of the values of x


def activations(subject: Subject) -> tuple[str, ...]:
    """Those that are claimed."""
    return tuple(name for name in ACTIVATIONS if f"activation:{name}" in subject.claims)


@dataclass(frozen=True)
class Gated:
    """Rows [N, 2 D]."""

    N: int
    D: int
    seed: int
    activation: str
    dtype: str = "float32"
    size: str = "normal"

    def arguments(self, subject: Subject) -> dict[str, Any]:
        """The call."""
        x = draw.normal((self.N, 2 * self.D), self.seed, subject.device) * SIZES[self.size]
        return {"x": x.to(getattr(torch, self.dtype)), "activation": self.activation}


def halves(x: Any) -> tuple[Any, Any]:
    """Gate and up of stored values."""
    gate, up = np.split(plain(x, "x"), 2, -1)
    return gate, up


def scale_of(x: Tensor) -> Any:
    """What the tolerance of y is relative to: up, beside fp16's least step of 2^-24."""
    return np.maximum(np.abs(halves(x)[1]), 2.0**-4 if x.dtype == torch.float16 else 0.0)


def reach(x: Tensor, g: Any) -> Any:
    """What the tolerance of a gradient is relative to, beside fp16's least step."""
    gate, up = halves(x)
    size = np.abs(g) * np.maximum(1.0, np.maximum(np.abs(gate), np.abs(up)))
    size = np.maximum(size, 2.0**-5) if x.dtype == torch.float16 else size
    return np.concatenate([size, size], -1)


def cases(subject: Subject) -> st.SearchStrategy[Gated]:
    """Every claimed dtype and activation."""
    return st.builds(
        Gated,
        N=st.integers(1, 3),
        D=st.sampled_from(WIDTHS),
        seed=st.integers(0, 2**20),
        activation=st.sampled_from(activations(subject)),
        dtype=st.sampled_from(subject.dtypes),
        size=st.sampled_from(tuple(SIZES)),
    )


def plain_cases(subject: Subject) -> st.SearchStrategy[Gated]:
    """Narrow rows in the first claimed dtype."""
    return cases(subject).map(lambda c: replace(c, dtype=subject.dtypes[0], D=min(c.D, 100), size="normal"))


@attack("GL-01", cases)
def the_definition_in_float64(subject: Subject, case: Gated) -> None:
    """The first half is the gate."""
    given = case.arguments(subject)
    y = subject(**given)
    want = glu(plain(given["x"], "x"), case.activation)
    close(subject, "y", y, want, case.dtype, scale=scale_of(given["x"]))
    require(y.dtype == given["x"].dtype, f"y of {case.dtype} is {y.dtype}")


@attack("GL-02", cases)
def one_rounding(subject: Subject, case: Gated) -> None:
    """In 16 bits each y is one of the two numbers that the ends of fp32's interval round to, or between them."""
    given = case.arguments(subject)
    y, want = plain(subject(**given), "y"), glu(plain(given["x"], "x"), case.activation)
    atol, rtol = subject.tolerance("y", "float64" if case.dtype == "float64" else "float32")
    margin = atol * np.abs(halves(given["x"])[1]) + rtol * np.abs(want)
    low, high = (plain(torch.from_numpy(want + way * margin).to(given["x"].dtype), "y") for way in (-1, 1))
    outside = int(((y < low) | (y > high)).sum())
    require(outside == 0, f"{outside} of {y.size} results are rounded more than once")


@attack("GL-03", cases)
def twice_up_gives_twice_y(subject: Subject, case: Gated) -> None:
    """A power of two changes no digit."""
    given = replace(case, size="normal").arguments(subject)
    x = given["x"].clone()
    x[:, case.D :] *= 2
    y, twice = subject(**given), subject(**{**given, "x": x})
    usual = y.abs() > (1e-3 if case.dtype == "float16" else 0.0)  # its least numbers have fewer digits
    same_bits("y", torch.where(usual, twice, 0.0), torch.where(usual, 2 * y, 0.0), "for twice up")


@attack("GL-04", plain_cases)
def elements_are_apart(subject: Subject, case: Gated) -> None:
    """NaN in one gate, and in one up."""
    given = replace(case, N=3).arguments(subject)
    want = subject(**given)
    for column in (case.seed % case.D, case.D + case.seed % case.D):
        bad = given["x"].clone()
        bad[1, column] = torch.nan
        y = subject(**{**given, "x": bad})
        rest = torch.ones_like(y, dtype=torch.bool)
        rest[1, column % case.D] = False
        require(bool(y[~rest].isnan().all()), "NaN in x gives a number")
        close(subject, "y", torch.where(rest, y, 0.0), plain(torch.where(rest, want, 0.0), "y"), case.dtype)


@attack("GL-05", cases)
def gradients_match_float64(subject: Subject, case: Gated) -> None:
    """For drawn upstream gradients; of gates as large as their dtype holds too."""
    given = case.arguments(subject)
    x = given["x"].requires_grad_()
    up = draw.normal((case.N, case.D), case.seed + 9, subject.device).to(x.dtype)
    (grad,) = torch.autograd.grad(subject(**given), x, up)
    want = glu_gradient(plain(x, "x"), case.activation, plain(up, "g"))
    close(subject, "grad", grad, want, case.dtype, scale=reach(x, plain(up, "g")))
    most = x.new_tensor(torch.finfo(x.dtype).max)
    far = x.detach().clone()
    far[:, : case.D] = torch.where(far[:, : case.D] < 0, -most, most)
    far[:, case.D :] = 0.5
    far.requires_grad_()
    (grad,) = torch.autograd.grad(subject(far, activation=case.activation), far, torch.full_like(up, 0.5))
    require(bool(grad.isfinite().all()), "the gradient of a large gate is not finite")


@attack("GL-06", plain_cases, scale=0.2)
def no_rows_give_empty_results(subject: Subject, case: Gated) -> None:
    """Also in more dimensions."""
    given = case.arguments(subject)
    for rows in ((0,), (2, 0)):
        y = subject(**{**given, "x": given["x"][0].expand(*rows, 2 * case.D)})
        require(y.shape == (*rows, case.D), f"no rows of {2 * case.D} give {list(y.shape)}")


@attack("GL-10", cases)
def a_row_is_the_same_in_any_batch(subject: Subject, case: Gated) -> None:
    """Alone, reversed, beside many others: the bits of a row and of its gradient do not move."""
    given = replace(case, N=3).arguments(subject)

    def taken(rows: list[int]) -> dict[str, Tensor]:
        x = given["x"][rows].clone().requires_grad_("grad" in subject.claims)
        y = subject(**{**given, "x": x})
        grads = torch.autograd.grad(y, x, torch.ones_like(y)) if y.requires_grad else ()
        return {"y": y.detach()} | dict(zip(("d_x",), grads, strict=False))

    want = taken([0, 1, 2])
    same_results({n: x.flip(0) for n, x in taken([2, 1, 0]).items()}, want, "in a reversed batch")
    same_results(taken([1]), {n: x[1:2] for n, x in want.items()}, "alone")
    same_results({n: x[-3:] for n, x in taken([0, 1, 2] * 40).items()}, want, "at the end of a large batch")


derive("glu", lambda s, c: c.arguments(s), inputs_untouched=plain_cases, determinism=plain_cases, capture=plain_cases)
