"""The calls of whiten@1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import rewards as definition
from rlkernel_core.spec.advantage_kinds import EPS_MODES

SHAPES = ((3, 7), (5,), (), (2, 3, 4), (1, 1), (4, 200), (0, 3), (2, 1))
SPREAD = {
    "normal": (1.0, 0.0),
    "far": (1.0, 1e4),
    "tiny": (2.0**-20, 0.0),
    "huge": (2.0**12, 0.0),
    "denormal": (1e-40, 0.0),
}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Options, shapes and values."""
    return {
        "shape": SHAPES,
        "values": (*SPREAD, "constant", "negative zero", "two values", "not finite", "std is eps"),
        "dtype": (*subject.dtypes, *(("int64", "bool") if subject.takes_any_dtype else ())),
        "valid": claimed(subject, {"all": "", "mask": "mask", "nothing": "mask", "one": "mask", "lengths": "lengths"}),
        "counts": claimed(subject, {"": "", "some": "counts", "fractions": "counts"}),
        "ddof": (1, 0, 2),
        "eps": (1e-8, 0.0, 0.5),
        "eps_mode": EPS_MODES,
        "shift_mean": (True, False),
        "masked_out": claimed(subject, {"zero": "", "carry": "carry"}),
        "apply": (True, False),
    }


RULES = (
    Rule(("values", "eps"), lambda values, eps: values != "denormal" or eps > 0),  # their variance is 0 in fp32
    Rule(("shape", "valid"), lambda shape, valid: valid != "lengths" or len(shape) == 2),
)


def values_of(point: Point) -> Tensor:
    """[...] float64, on a grid that every dtype holds where it matters."""
    shape, name, g = point["shape"], point["values"], point.generator()
    if name == "constant":
        return torch.full(shape, 30.1, dtype=torch.float64)
    if name == "negative zero":
        return torch.full(shape, -0.0, dtype=torch.float64)
    if name in {"two values", "std is eps"}:  # the second has a variance of exactly 1/4 for ddof = 0
        bits = torch.arange(int(np.prod(shape, dtype=np.int64))).view(shape) % 2
        return bits.double() - (0.0 if name == "two values" else 0.5)
    x = torch.randint(-64, 65, shape, generator=g).double() / 32
    if name == "not finite":
        flat = x.view(-1)
        flat[1::4], flat[2::5], flat[3::7] = torch.nan, torch.inf, -torch.inf
        return x
    scale, offset = SPREAD[name]
    return x * scale + offset


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    shape, g = point["shape"], point.generator(1)
    x, dtype = values_of(point), getattr(torch, point["dtype"])
    x = x.to(dtype) if dtype.is_floating_point else x.nan_to_num(0, 1, -1).clamp(-1e4, 1e4).to(dtype)
    given: Given = {name: point[name] for name in ("ddof", "eps", "eps_mode", "shift_mean", "masked_out", "apply")}
    valid = point["valid"]
    if valid == "lengths":
        given["lengths"] = torch.randint(0, shape[1] + 1, shape[:1], generator=g)
    elif valid != "all":
        mask = torch.rand(shape, generator=g) < {"mask": 0.7, "nothing": 0.0, "one": 0.0}[valid]
        mask.view(-1)[:1] |= valid == "one"
        given["mask"] = mask
    if point["counts"]:
        counts = torch.randint(0, 5, shape, generator=g)
        given["counts"] = counts / 2 if point["counts"] == "fractions" else counts
    moved = {n: v.to(subject.device) if isinstance(v, Tensor) else v for n, v in given.items()}
    return {"x": x.to(subject.device), **moved}


def valid_of(given: Given) -> Any:
    """Where values are valid and finite."""
    x = plain(given["x"], "x")
    if "mask" in given:
        return plain(given["mask"], "mask")
    if "lengths" in given:
        return np.arange(x.shape[1]) < plain(given["lengths"], "lengths")[:, None]
    return np.ones(x.shape, bool)


def expected(subject: Subject, point: Point, given: Given, _: Mapping[str, Any]) -> dict[str, Want]:
    """Result and moments."""
    x, m = plain(given["x"], "x").astype(np.float64), valid_of(given)
    finite = np.isfinite(x)
    times = (m & finite) * (plain(given["counts"], "counts") if "counts" in given else 1.0)
    dtype = point["dtype"]
    row, stored = (dtype, "float64" if dtype == "float64" else "float32")
    shift = x[times > 0][0] if (times > 0).any() else 0.0  # so that float64 far from 0 is as good as at 1
    n, mean, var = definition.moments(np.where(finite, x, 0.0) - shift, times, given["ddof"])
    rstd = definition.rstd(var, given["eps"], given["eps_mode"]) if n else 0.0
    with np.errstate(invalid="ignore"):  # a masked value is carried as it is, infinity and NaN too
        y = (x - shift - mean) * rstd
    mean = mean + shift if n else 0.0
    y = y + (0.0 if given["shift_mean"] else mean)
    y = np.where((m & finite) | (~m & (given["masked_out"] == "carry")), y, 0.0)
    size = max(1.0, float(np.abs(x[times > 0]).max(initial=0.0)) * rstd)

    def near(values: Any, scale: Any) -> Want:
        return Want.near(subject, "y", row, values, scale=scale, stored=stored)

    found = {
        "count": Want(n, 0.0, stored),
        "mean": near(mean, max(1.0, abs(mean))),
        "var": near(var, max(1.0, var, abs(mean))),
        "rstd": near(rstd, max(1.0, rstd)),
    }
    if given["apply"]:
        found["y"] = near(y, max(size, np.abs(y[np.isfinite(y)]).max(initial=0.0)))
    return found


INTEGERS = ("int64", "int32", "int16")
SPACE = Space(
    "whiten",
    factors,
    arguments,
    expected,
    {
        "x": Argument(),
        "mask": Argument(given=Rule(("valid",), lambda v: v not in {"all", "lengths"})),
        "lengths": Argument(SAME_VALUES, INTEGERS, Rule(("valid",), lambda v: v == "lengths")),
        "counts": Argument(
            SAME_VALUES, ("float32", "float64", "bfloat16"), Rule(("counts",), lambda c: c == "fractions")
        ),
    },
    RULES,
    lambda _: [{"shape": shape} for shape in ((4097, 9), (1, 8193), (65537,), (1 << 20,), (3, 27648))],
    constants=True,
)
