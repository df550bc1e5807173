"""The calls of rms_norm@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlkernel_conformance.clauses.rms_norm import OFFSETS, expected, reach, stored_sum
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import ANY, SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.rms_norm import rms_norm_gradients

SIZES = {"normal": 1.0, "large": 200.0, "small": 2.0**-12}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "rows": ((3,), (1,), (), (2, 3), (0,), (130,)),
        "D": (5, 1, 64, 130, 1024, 1025),
        "dtype": subject.dtypes,
        "values": tuple(SIZES),
        "residual": claimed(subject, {"": "", "drawn": "residual"}),
        "offset": OFFSETS,
        "eps": (1e-6, 0.5, 1),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    g, dtype, shape = point.generator(), getattr(torch, point["dtype"]), (*point["rows"], point["D"])

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    given: Given = {"x": (drawn(*shape) * SIZES[point["values"]]).to(dtype)}
    given["weight"] = (1 + 0.25 * drawn(point["D"])).to(dtype)
    if point["residual"]:
        given["residual"] = (drawn(*shape) * SIZES[point["values"]]).to(dtype)
    given = {n: x.to(subject.device) for n, x in given.items()}
    return given | {"eps": point["eps"], "offset": point["offset"]}


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition on the stored rows."""
    dtype, s = point["dtype"], plain(stored_sum(given), "s")
    found = {"y": Want.near(subject, "y", dtype, expected(given), stored=dtype)}
    if point["residual"]:
        found["residual"] = Want(s, dtype=dtype)
    if not upstream:
        return found
    flat = (-1, s.shape[-1])
    weight, g = plain(given["weight"], "weight"), np.broadcast_to(upstream.get("y", 0.0), s.shape)
    d_s, size_s, d_w, size_w = rms_norm_gradients(
        s.reshape(flat), weight, given["eps"], given["offset"], g.reshape(flat)
    )
    more = np.broadcast_to(upstream.get("residual", 0.0), s.shape).reshape(flat)
    d_s, size_s = (d_s + more).reshape(s.shape), (size_s + np.abs(more)).reshape(s.shape)

    def near(name: str, values: Any, size: Any) -> Want:
        kind = str(given[name].dtype).removeprefix("torch.")
        return Want.near(subject, "grad", kind, values, scale=reach(size, kind))

    found |= {"d_x": near("x", d_s, size_s), "d_weight": near("weight", d_w, size_w)}
    return found | ({"d_residual": near("residual", d_s, size_s)} if point["residual"] else {})


SPACE = Space(
    "rms_norm",
    factors,
    arguments,
    answers,
    {
        "x": Argument(ANY),
        "weight": Argument(SAME_VALUES, ("", "float32")),
        "residual": Argument(ANY, given=Rule(("residual",), bool)),
    },
    (),
    lambda s: [
        {"rows": (3,), "D": 4096, **({"residual": "drawn"} if "residual" in s.claims else {})},
        {"rows": (2,), "D": 14336},
        {"rows": (1,), "D": 65537},
        {"rows": (513, 8), "D": 128},
    ],
)
