"""Attacks on acme_relu2@1, which `rlkernel conformance run acme` imports."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from rlkernel_conformance import draw
from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive
from rlkernel_conformance.compare import plain, require, same_bits, within
from rlkernel_conformance.spaces.layouts import ANY
from rlkernel_conformance.spaces.space import Argument, Space, Want
from rlkernel_conformance.subject import Subject


def EXAMPLE(e: Any) -> dict[str, Any]:  # noqa: N802 a table for other operators, a function for one
    """Arguments of a plain call of six rows, for the clauses that every operator has."""
    return {"x": e.normal(e.N, 32)}


def definition(x: Any) -> Any:
    """The operator in float64."""
    return np.maximum(x, 0.0) ** 2


def drawn(subject: Subject, case: tuple[int, int, str]) -> torch.Tensor:
    """Values of both signs."""
    N, seed, dtype = case
    return draw.normal((N, 33), seed, subject.device).to(getattr(torch, dtype))


def rows(subject: Subject) -> st.SearchStrategy[tuple[int, int, str]]:
    """Number of rows, seed, dtype."""
    return st.tuples(st.sampled_from((1, 3, 130)), st.integers(0, 2**20), st.sampled_from(subject.dtypes))


@attack("ACME-01", rows)
def the_definition_in_float64(subject: Subject, case: tuple[int, int, str]) -> None:
    """Values of both signs, and NaN."""
    x = drawn(subject, case)
    x[0, 0] = torch.nan
    y = subject(x=x)
    require(bool(y[0, 0].isnan()), "NaN does not stay NaN")
    want = definition(plain(x, "x"))
    atol, rtol = subject.tolerance("y", case[2])
    within(subject, "y", y.nan_to_num(), np.nan_to_num(want), atol + rtol * np.abs(np.nan_to_num(want)))


@attack("ACME-02", rows)
def the_gradient(subject: Subject, case: tuple[int, int, str]) -> None:
    """Beside float64, and exactly 0 at 0."""
    x = drawn(subject, case)
    x[0, 0] = 0.0
    x.requires_grad_()
    g = drawn(subject, (case[0], case[1] + 1, case[2]))
    (found,) = torch.autograd.grad(subject(x=x), x, g)
    require(bool(found[0, 0] == 0), f"the gradient at 0 is {found[0, 0]}")
    want = 2 * np.maximum(plain(x.detach(), "x"), 0.0) * plain(g, "g")
    atol, rtol = subject.tolerance("grad", case[2])
    within(subject, "grad", found, want, atol + rtol * np.abs(want))


@attack("ACME-04", rows)
def a_row_is_the_same_alone(subject: Subject, case: tuple[int, int, str]) -> None:
    """The bits of the last row, alone and in its batch."""
    x = drawn(subject, case)
    same_bits("y", subject(x=x[-1:]), subject(x=x)[-1:], "alone")


derive("acme_relu2", lambda s, c: {"x": drawn(s, c)}, determinism=rows)


def _answers(subject: Subject, point: Any, given: Any, upstream: Any) -> dict[str, Want]:
    x, dtype = plain(given["x"], "x"), point["dtype"]
    found = {"": Want.near(subject, "y", dtype, definition(x), stored=dtype)}
    if upstream:
        found["d_x"] = Want.near(subject, "grad", dtype, 2 * np.maximum(x, 0.0) * upstream[""])
    return found


# Sizes and values whose pairs, with layouts, modes and gradients, clauses 97 and 98 go through.
SPACE = Space(
    "acme_relu2",
    lambda subject: {"rows": ((3,), (1,), (2, 3), (0,), (130,)), "D": (5, 1, 64, 1025), "dtype": subject.dtypes},
    lambda subject, point: {
        "x": torch.randn((*point["rows"], point["D"]), generator=point.generator())
        .to(getattr(torch, point["dtype"]))
        .to(subject.device)
    },
    _answers,
    {"x": Argument(ANY)},
    (),
    lambda _: [{"rows": (3,), "D": 14336}, {"rows": (4099,), "D": 64}],
)
