"""The calls of linear@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlkernel_conformance.clauses.linear import bounded, expected, flat
from rlkernel_conformance.spaces.layouts import ANY
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.linear import linear_gradients

SIZES = {"normal": 1.0, "large": 30.0, "small": 2.0**-6}  # of the values of x


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": ((3,), (1,), (), (2, 3), (0,), (130,)),
        "K": (5, 1, 64, 130, 520),
        "N": (3, 1, 64, 130),
        "dtype": subject.dtypes,
        "values": tuple(SIZES),
        "bias": claimed(subject, {"": "", "drawn": "bias"}),
        "residual": claimed(subject, {"": "", "drawn": "residual"}),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    g, dtype, size = point.generator(), getattr(torch, point["dtype"]), SIZES[point["values"]]

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    given: Given = {"x": drawn(*point["rows"], point["K"]) * size, "weight": drawn(point["N"], point["K"])}
    if point["bias"]:
        given["bias"] = drawn(point["N"]) * size
    if point["residual"]:
        given["residual"] = drawn(*point["rows"], point["N"]) * size
    return {n: x.to(dtype).to(subject.device) for n, x in given.items()}


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition."""
    dtype, x, shape = point["dtype"], given["x"], (*point["rows"], point["N"])
    found = {"": _want(dtype, shape, *expected(given))}
    if not upstream:
        return found
    g = np.broadcast_to(upstream[""], shape)
    rows = g.reshape(-1, point["N"])
    wants = linear_gradients(flat(given, "x"), flat(given, "weight"), rows)
    for name, want, terms in zip(("x", "weight", "bias"), wants, (point["N"], len(rows), len(rows)), strict=True):
        if name in given:
            found[f"d_{name}"] = _want(dtype, tuple(given[name].shape), *bounded(x.dtype, want, terms))
    return found | ({"d_residual": Want(g, dtype=dtype)} if point["residual"] else {})


def _want(dtype: str, shape: tuple[int, ...], values: Any, allowed: Any) -> Want:
    return Want(values.reshape(shape), np.broadcast_to(allowed, values.shape).reshape(shape), dtype)


SPACE = Space(
    "linear",
    factors,
    arguments,
    answers,
    {
        "x": Argument(ANY),
        "weight": Argument(ANY),
        "bias": Argument(ANY, given=Rule(("bias",), bool)),
        "residual": Argument(ANY, given=Rule(("residual",), bool)),
    },
    (),
    lambda _: [
        {"rows": (3,), "K": 4096, "N": 40},
        {"rows": (2,), "K": 11008, "N": 5},
        {"rows": (2,), "K": 14336, "N": 5},
        {"rows": (2,), "K": 64, "N": 24576},
        {"rows": (4099,), "K": 64, "N": 3},
        {"rows": (4200,), "K": 512, "N": 640},
    ],
)
