"""The calls of affine_suffix_scan@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.sequences import MASKED, PACKED, Sequences
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions.scan import adjoint_row, scan_row

WAYS = {
    "full": "",
    "mask": "mask",
    "nothing": "mask",
    "lengths": "lengths",
    "packed": "packed",
    "packed mask": ("packed", "mask"),
    "packed tail": "packed",
}
FACTORS = {"a half": 0.5, "one": 1.0, "zero": 0.0, "negative": -0.75, "near one": 0.984375}
TENSORS = ("drawn", "with zeros", "ones")


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, sizes and values."""
    ways = [
        w for w, needed in WAYS.items() if {*([needed] if isinstance(needed, str) else needed)} - {""} <= subject.claims
    ]
    return {
        "B": (3, 1, 2, 0),
        "T": (5, 1, 33, 300, 128, 0),
        "tokens": ways,
        "dtype": subject.dtypes,
        "a": claimed(subject, {**dict.fromkeys(FACTORS, ""), **dict.fromkeys(TENSORS, "a_tensor")}),
        "values": ("normal", "far", "tiny", "negative zero", "denormal"),
        "init": claimed(subject, {"": "", "drawn": "init"}),
        "exclusive": claimed(subject, {False: "", True: "exclusive"}),
        "masked_out": claimed(subject, {"zero": "", "carry": "carry"}),
    }


VALUES = {"normal": (1.0, 0.0), "far": (1.0, 1024.0), "tiny": (2.0**-12, 0.0), "denormal": (1e-40, 0.0)}


def sequences_of(point: Point) -> Sequences:
    """Which tokens there are."""
    return Sequences.draw(point["B"], point["T"], point["tokens"], point.generator(1))


def arguments(subject: Subject, point: Point) -> Given:
    """The call; what does not count is NaN."""
    s, g, dtype = sequences_of(point), point.generator(2), getattr(torch, point["dtype"])
    unused = torch.from_numpy(~s.valid).view(s.shape)

    def drawn(values: Tensor) -> Tensor:
        return values.masked_fill(unused, torch.nan).to(dtype)

    scale, offset = VALUES.get(point["values"], (-0.0, 0.0))
    given: Given = {"b": drawn(torch.randn(s.shape, generator=g, dtype=torch.float64) * scale + offset)}
    a = torch.rand(s.shape, generator=g, dtype=torch.float64) * 1.9 - 0.95
    a = torch.where(torch.rand(s.shape, generator=g) < 0.3, 0.0, a) if point["a"] == "with zeros" else a
    a = torch.ones_like(a) if point["a"] == "ones" else a
    given["a"] = drawn(a) if point["a"] in TENSORS else FACTORS[point["a"]]
    given |= {name: x.clone() for name, x in s.given.items()}
    if point["init"]:
        given["init"] = torch.randn(point["B"], generator=g, dtype=torch.float64).to(dtype)
    given |= {"exclusive": True} if point["exclusive"] else {}
    given |= {"masked_out": "carry"} if point["masked_out"] == "carry" else {}
    return {n: x.to(subject.device) if isinstance(x, Tensor) else x for n, x in given.items()}


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The recurrence, and its adjoint."""
    s, dtype = sequences_of(point), point["dtype"]
    b, a, init = _stored(given, s)
    y, carry, size = np.zeros(s.tokens), np.zeros(point["B"]), np.ones(s.tokens)
    more = {"exclusive": point["exclusive"], "carry": point["masked_out"] == "carry"}
    for i, at in enumerate(s.rows):
        y[at], carry[i] = scan_row(a[at], b[at], s.valid[at], init[i], **more)
        size[at] = max(1.0, np.abs(y[at]).max(initial=0.0), abs(carry[i]), abs(init[i]))
    most = np.array([size[at].max(initial=1.0) for at in s.rows]).reshape(-1)
    most = np.maximum(most, np.abs(carry))
    stored = "float64" if dtype == "float64" else "float32"
    found = {
        "y": Want.near(subject, "y", dtype, y.reshape(s.shape), scale=size.reshape(s.shape), stored=stored),
        "carry": Want.near(subject, "y", dtype, carry, scale=most, stored=stored),
    }
    return found | (_gradients(subject, point, s, given, upstream) if upstream else {})


def _stored(given: Given, s: Sequences) -> tuple[Any, Any, Any]:
    """b, a and init as the definition takes them, 0 where a token does not count."""
    b = np.where(s.valid, plain(given["b"], "b").reshape(-1), 0.0)
    a = given["a"]
    a = np.where(s.valid, plain(a, "a").reshape(-1), 0.0) if isinstance(a, Tensor) else np.full(s.tokens, a)
    init = plain(given["init"], "init") if "init" in given else np.zeros(len(s.rows))
    return b, a, init


def _gradients(
    subject: Subject, point: Point, s: Sequences, given: Given, upstream: Mapping[str, Any]
) -> dict[str, Want]:
    b, a, init = _stored(given, s)
    g_y = upstream.get("y", np.zeros(s.shape)).reshape(-1)
    g_carry = upstream.get("carry", np.zeros(len(s.rows)))
    d_b, d_a, d_init = np.zeros(s.tokens), np.zeros(s.tokens), np.zeros(len(s.rows))
    size, sizes = np.ones(s.tokens), np.ones(len(s.rows))
    for i, at in enumerate(s.rows):
        valid = s.valid[at]
        up, rest = _reaching(valid, g_y[at], exclusive=point["exclusive"], carried=point["masked_out"] == "carry")
        d_b[at], d_a[at], d_init[i] = adjoint_row(a[at], b[at], valid, init[i], up, g_carry[i])
        d_init[i] += rest
        y, _ = scan_row(a[at], b[at], valid, init[i])
        sizes[i] = max(
            1.0,
            np.abs(d_b[at]).max(initial=0.0) * max(1.0, np.abs(y).max(initial=0.0), abs(init[i])),
            np.abs(g_y[at]).max(initial=0.0),
            abs(g_carry[i]),
            abs(d_init[i]),
        )
        size[at] = sizes[i]

    def near(name: str, values: Any, scale: Any) -> Want:
        of = given[name] if isinstance(given.get(name), Tensor) else given["b"]
        return Want.near(subject, "grad", str(of.dtype).removeprefix("torch."), values, scale=scale)

    size = size.reshape(s.shape)
    found = {"d_b": near("b", d_b.reshape(s.shape), size), "d_a": near("a", d_a.reshape(s.shape), size)}
    return found | {"d_init": near("init", d_init, sizes)}


def _reaching(valid: Any, g: Any, *, exclusive: bool, carried: bool) -> tuple[Any, float]:
    """Upstream gradients of each token's y, and what reaches `init` directly, from those of what was returned."""
    up, rest, last = np.zeros(len(g)), 0.0, -1  # `last`: the valid token whose y is behind this one
    for t in range(len(g) - 1, -1, -1):
        if valid[t] and not exclusive:
            up[t] += g[t]
        elif valid[t] or carried:
            if last < 0:
                rest += g[t]
            else:
                up[last] += g[t]
        last = t if valid[t] else last
    return up, rest


INTEGERS = ("int64", "int32", "int16")
LIKE_B = Rule(("a",), lambda a: a in TENSORS)
SPACE = Space(
    "affine_suffix_scan",
    factors,
    arguments,
    expected,
    {
        "b": Argument(SAME_VALUES),
        "a": Argument(SAME_VALUES, ("", "float32", "bfloat16"), LIKE_B),
        "mask": Argument(SAME_VALUES, given=Rule(("tokens",), lambda t: t in MASKED)),
        "lengths": Argument(SAME_VALUES, INTEGERS, Rule(("tokens",), lambda t: t == "lengths")),
        "cu_seqlens": Argument(SAME_VALUES, INTEGERS, Rule(("tokens",), lambda t: t in PACKED)),
        "init": Argument(SAME_VALUES, ("", "float32", "bfloat16"), Rule(("init",), bool)),
    },
    (),
    lambda _: [
        {"T": 8193, "B": 2},
        {"T": 131_073, "B": 1, "a": "near one"},
        {"T": 3, "B": 4099},
        {"T": 2, "B": 65_537},
    ],
)
