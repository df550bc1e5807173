"""The calls of glu@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rlkernel_conformance.clauses.glu import SIZES, activations, reach, scale_of
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import ANY
from rlkernel_conformance.spaces.space import Argument, Given, Point, Space, Want
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.glu import glu, glu_gradient


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": ((3,), (1,), (), (2, 3), (0,), (130,)),
        "D": (5, 1, 64, 130, 1025),
        "dtype": subject.dtypes,
        "values": tuple(SIZES),
        "activation": activations(subject),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    shape = (*point["rows"], 2 * point["D"])
    x = torch.randn(shape, generator=point.generator(), dtype=torch.float64) * SIZES[point["values"]]
    return {"x": x.to(getattr(torch, point["dtype"])).to(subject.device), "activation": point["activation"]}


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition."""
    dtype, x = point["dtype"], given["x"]
    values = glu(plain(x, "x"), point["activation"])
    found = {"": Want.near(subject, "y", dtype, values, scale=scale_of(x), stored=dtype)}
    if upstream:
        g = upstream[""]
        want = glu_gradient(plain(x, "x"), point["activation"], g)
        found["d_x"] = Want.near(subject, "grad", dtype, want, scale=reach(x, g))
    return found


SPACE = Space(
    "glu",
    factors,
    arguments,
    expected,
    {"x": Argument(ANY)},
    (),
    lambda _: [{"rows": (3,), "D": 14336}, {"rows": (4099,), "D": 64}, {"rows": (2,), "D": 65537}],
)
