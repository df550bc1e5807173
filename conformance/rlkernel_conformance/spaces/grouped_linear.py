"""The calls of grouped_linear@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from rlkernel_conformance.clauses.grouped_linear import expected, flat
from rlkernel_conformance.clauses.linear import bounded
from rlkernel_conformance.spaces.layouts import ANY, SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.grouped_linear import grouped_linear_gradients

VALUES: Final = {"normal": 1.0, "large": 30.0, "small": 2.0**-6}  # sizes of the values of x
# Rows of each expert; of the wild ones an end falls, and one lies beyond T.
SIZES: Final = {
    "two": (2, 1),
    "one": (3,),
    "some are empty": (0, 2, 0, 3, 0),
    "none has rows": (0, 0),
    "wild": (1, 0, 2),
    "many rows": (70, 1, 129),
    "many experts": (1, 0) * 40,
}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "sizes": tuple(SIZES),
        "rest": (0, 2),
        "K": (5, 1, 64, 130, 520),
        "N": (3, 1, 64, 130),
        "dtype": subject.dtypes,
        "values": tuple(VALUES),
        "bias": claimed(subject, {"": "", "drawn": "bias"}),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    g, dtype, size = point.generator(), getattr(torch, point["dtype"]), VALUES[point["values"]]
    sizes = SIZES[point["sizes"]]

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    E, N, K = len(sizes), point["N"], point["K"]
    given: Given = {"x": drawn(sum(sizes) + point["rest"], K) * size, "weight": drawn(E, N, K)}
    if point["bias"]:
        given["bias"] = drawn(E, N) * size
    ends = torch.tensor(sizes).cumsum(0).int()
    if point["sizes"] == "wild":
        ends[1], ends[2] = -(2**31), 2**31 - 1
    return {n: x.to(dtype).to(subject.device) for n, x in given.items()} | {"ends": ends.to(subject.device)}


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition."""
    dtype, x = point["dtype"], given["x"]
    found = {"": Want(*expected(given), dtype)}
    if not upstream:
        return found
    g = np.broadcast_to(upstream[""], (x.shape[0], point["N"]))
    wants = grouped_linear_gradients(flat(given, "x"), flat(given, "weight"), flat(given, "ends"), g)
    for name, want, terms in zip(("x", "weight", "bias"), wants, (point["N"], len(g), len(g)), strict=True):
        if name in given:
            found[f"d_{name}"] = Want(*bounded(x.dtype, want, terms), dtype)
    return found


SPACE = Space(
    "grouped_linear",
    factors,
    arguments,
    answers,
    {
        "x": Argument(ANY),
        "weight": Argument(ANY),
        "ends": Argument(SAME_VALUES),
        "bias": Argument(ANY, given=Rule(("bias",), bool)),
    },
    (),
    lambda _: [
        {"sizes": "two", "K": 4096, "N": 40},
        {"sizes": "two", "K": 14336, "N": 5},
        {"sizes": "two", "K": 64, "N": 24576},
        {"sizes": "many rows", "K": 512, "N": 640},
    ],
)
