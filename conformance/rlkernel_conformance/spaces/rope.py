"""The calls of rope@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlkernel_conformance.clauses.rope import OFFSETS, expected, expected_gradients, reach
from rlkernel_conformance.spaces.layouts import ANY, SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject

SIZES = {"normal": 1.0, "large": 200.0, "small": 2.0**-12}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    return {
        "tokens": ((3,), (1,), (), (2, 3), (0,), (70,)),
        "heads": ((2, 1), (1, 1), (1, 3), (4, 4)),
        "widths": ((6, 4), (2, 2), (64, 64), (130, 66)),  # of a head, of the table
        "dtype": subject.dtypes,
        "values": tuple(SIZES),
        "weights": claimed(subject, {"": "", "qk": "norm", "q": "norm", "k": "norm"}),
        "interleaved": claimed(subject, {False: "", True: "interleaved"}),
        "offset": OFFSETS,
        "eps": (1e-6, 0.5, 1),
        "beyond": (False, True),
    }


def arguments(subject: Subject, point: Point) -> Given:
    """The call; `beyond`: the first token has no place in the table."""
    g, dtype = point.generator(), getattr(torch, point["dtype"])
    D, R = point["widths"]

    def drawn(*shape: int) -> Any:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    given: Given = {
        name: (drawn(*point["tokens"], heads, D) * SIZES[point["values"]]).to(dtype)
        for name, heads in zip("qk", point["heads"], strict=True)
    }
    positions = torch.randint(20, point["tokens"], generator=g)
    if point["beyond"] and positions.numel():
        positions.view(-1)[0] = 20
    given |= {"positions": positions, "table": drawn(20, R).float()}
    given |= {f"{name}_weight": (1 + 0.25 * drawn(D)).to(dtype) for name in point["weights"]}
    given = {n: x.to(subject.device) for n, x in given.items()} | {"interleaved": point["interleaved"]}
    return given | ({"eps": point["eps"], "offset": point["offset"]} if point["weights"] else {})


def answers(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition, and its gradients."""
    found = {}

    def near(output: str, of: str, values: Any, size: Any, stored: str | None = None) -> Want:
        kind = str(given[of].dtype).removeprefix("torch.")
        scale = reach(np.nan_to_num(size), kind)
        return Want.near(subject, output, kind, values, scale=scale, stored=stored)

    for name in "qk":
        found[name] = near("y", name, *expected(given, name), stored=point["dtype"])
        if not upstream:
            continue
        g = np.broadcast_to(upstream.get(name, 0.0), given[name].shape)
        d_x, size, d_w, size_w = expected_gradients(given, name, g)
        found[f"d_{name}"] = near("grad", name, d_x, size)
        if f"{name}_weight" in given:
            found[f"d_{name}_weight"] = near("grad", f"{name}_weight", d_w, size_w)
    return found


def _model(subject: Subject, tokens: int, heads: tuple[int, int], D: int, R: int, *options: str) -> dict[str, Any]:
    weights, pairs = ("qk" if "norm" in options else ""), "interleaved" in options
    sized = {"tokens": (tokens,), "heads": heads, "widths": (D, R)}
    return {**sized, "weights": weights, "interleaved": pairs} if subject.claims.issuperset(options) else sized


SPACE = Space(
    "rope",
    factors,
    arguments,
    answers,
    {
        "q": Argument(ANY),
        "k": Argument(ANY),
        "positions": Argument(SAME_VALUES, ("int64", "int32", "int16", "uint8")),
        "table": Argument(SAME_VALUES),
        "q_weight": Argument(SAME_VALUES, ("", "float32"), Rule(("weights",), lambda w: "q" in w)),
        "k_weight": Argument(SAME_VALUES, ("", "float32"), Rule(("weights",), lambda w: "k" in w)),
    },
    (
        Rule(("weights", "offset"), lambda weights, offset: bool(weights) or offset == 0.0),
        Rule(("weights", "eps"), lambda weights, eps: bool(weights) or eps == 1e-6),
    ),
    lambda s: [
        _model(s, 33, (32, 8), 128, 128, "norm"),  # Qwen3-8B
        _model(s, 17, (8, 4), 256, 256, "norm"),  # Gemma 3 4B
        _model(s, 65, (32, 2), 128, 64, "interleaved"),  # GLM-4-9B: half of a head, neighbors
        _model(s, 2, (1, 1), 65538, 1024, "norm"),
    ],
)
