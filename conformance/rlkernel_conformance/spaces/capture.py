"""The calls of capture@1: a recorded function is called again with one thing changed; every answer is the function's.

A change that a graph's key or fingerprint lacks gives the answer of another call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from rlkernel_conformance.call_checks import leaves
from rlkernel_conformance.compare import plain
from rlkernel_conformance.spaces.layouts import laid_out
from rlkernel_conformance.spaces.modes import under
from rlkernel_conformance.spaces.space import Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.spec.graphed import Bucket

COLUMNS: Final = 3


def number(x: Tensor, more: Any) -> Any:
    """A result without dimensions."""
    return {"total": (x * more["scale"]).sum(), "rows": x.new_ones(()) * x.shape[0]}


def nested(x: Tensor, more: Any) -> Any:
    """Values and tensors inside tuples and dicts."""
    (factor, added), scale = more["lora"], more["scale"]
    return x * scale + factor * added.to(x.dtype).sum(), (x.clone(), [factor * x[:, :1]])


def mode_dependent(x: Tensor, more: Any) -> Any:
    """What autocast, the default dtype and grad mode change."""
    made = torch.full((COLUMNS, COLUMNS), float(more["scale"]), device=x.device)
    return x.float() @ made.float(), made + 0, x.double() * (2 if torch.is_grad_enabled() else 3)


def masked(x: Tensor, more: Any, n: Tensor | None = None, m: Tensor | None = None) -> Any:
    """Sums over n rows and m columns, all unless given: what a bucket has added is masked."""
    rows = torch.arange(x.shape[0], device=x.device) < (x.shape[0] if n is None else n)
    columns = torch.arange(x.shape[1], device=x.device) < (x.shape[1] if m is None else m)
    y = torch.where(rows[:, None] & columns, x * more["scale"], 0)
    return {"y": y, "turned": y.t(), "rows": y.sum(1), "columns": y.sum(0), "total": y.sum()}


class Layer(nn.Module):
    """A layer that is static in a graph."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0, device=device).view(3, 3), requires_grad=False)
        self.scale = 1.0

    def forward(self, x: Tensor, more: Any) -> Any:
        """Another answer in training."""
        y = x.float() @ self.weight.float() * more["scale"]
        return y * 2 if self.training else y


FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "nested": nested,
    "number": number,
    "modes": mode_dependent,
}
PADS: Final = 7.0  # no result may hold it
BY_ROWS: Final = Bucket({"x": 0}, (2, 4, 8), {"y": 0, "turned": 1, "rows": -1}, "n")
BY_COLUMNS: Final = Bucket({"x": -1}, (2, 4), {"y": -1, "turned": 0, "columns": 0}, "m")
BUCKETS: Final[Mapping[str, tuple[Bucket, ...]]] = {
    "rows": (BY_ROWS,),
    "columns": (BY_COLUMNS,),
    "both": (BY_ROWS, BY_COLUMNS),
    "few rows": (replace(BY_ROWS, sizes=(2, 4), over="eager"),),
}
# What the second call changes.
CHANGES: Final = (
    "nothing",
    "values",
    "dtype",
    "rows",
    "rank",
    "layout",
    "no rows",
    "scale",
    "factor",
    "inner dtype",
    "inner values",
    "int for float",
    "autocast",
    "default dtype",
    "no_grad",
    "inference",
)
MODES_THEN: Final = {
    "autocast": "autocast",
    "default dtype": "float64 by default",
    "no_grad": "no_grad",
    "inference": "inference",
}
OF_LAYERS: Final = ("weight", "rebound", "cast", "eval", "weight and eval")


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Functions, changes and options."""
    return {
        "fn": (*FUNCTIONS, *claimed(subject, {"masked": "buckets", "layer": "static"})),
        "then": (*CHANGES, *claimed(subject, dict.fromkeys(OF_LAYERS, "static"))),
        "dtype": ("float32", "float64", "bfloat16", "int64"),
        "rows": (4, 1, 5),
        "buckets": claimed(subject, {None: "", **dict.fromkeys(BUCKETS, "buckets")}),
        "outputs": claimed(subject, {"clone": "outputs:clone", "view": "outputs:view"}),
        "verify": claimed(subject, {"never": "", "always": "verify"}),
        "guard": claimed(subject, {"sync": "", "call": "guard:call"}),
        "warmup": (1, 0),
        "max_graphs": (32, 1),
    }


BUCKETED: Final = {
    "rows": ("masked", "layer"),
    "few rows": ("masked", "layer"),
    "columns": ("masked",),
    "both": ("masked",),
}
RULES = (
    Rule(("fn", "then"), lambda fn, then: then not in OF_LAYERS or fn == "layer"),
    Rule(("fn", "then"), lambda fn, then: then not in {"factor", "inner dtype", "inner values"} or fn == "nested"),
    Rule(("fn", "buckets"), lambda fn, buckets: fn in BUCKETED.get(buckets, ("masked", *FUNCTIONS, "layer"))),
    Rule(("buckets", "then"), lambda buckets, then: not buckets or then != "rank"),
    Rule(("fn", "then"), lambda fn, then: then != "rank" or fn == "number"),
    Rule(("guard", "then"), lambda guard, then: guard == "call" or then not in {"rebound", "cast"}),
    Rule(("mode", "then"), lambda mode, then: mode == "plain" or then not in {*MODES_THEN}),
)


def function(subject: Subject, point: Point) -> Any:
    """What is captured."""
    if point["fn"] == "layer":
        return Layer(subject.device).train()
    return masked if point["fn"] == "masked" else FUNCTIONS[point["fn"]]


def arguments(subject: Subject, point: Point) -> Given:
    """The capture."""
    fn = function(subject, point)
    given: Given = {"fn": fn, "example": call_of(subject, point, "nothing")}
    given |= {name: point[name] for name in ("outputs", "verify", "guard", "warmup", "max_graphs")}
    if point["buckets"] is None:
        return given
    buckets = BUCKETS[point["buckets"]]
    if point["fn"] == "layer":  # each row alone: every output is cut, and nothing is masked
        buckets = tuple(replace(b, out=0, valid=None) for b in buckets)
    return given | {"buckets": buckets, "pad": {"x": PADS}}


def call_of(subject: Subject, point: Point, then: str) -> dict[str, Any]:
    """The arguments of a call of the recorded function."""
    rows = {"rows": point["rows"] + 1, "no rows": 0}.get(then, point["rows"])
    dtype = "float32" if then == "dtype" and point["dtype"] != "float32" else point["dtype"]
    dtype = "float64" if then == "dtype" and point["dtype"] == "float32" else dtype
    g = point.generator(1 if then == "values" else 0)
    x = torch.randint(-8, 9, (rows, COLUMNS), generator=g, device="cpu").to(subject.device, getattr(torch, dtype))
    x = laid_out(x, "transposed") if then == "layout" else x
    x = x.view(rows, COLUMNS, 1) if then == "rank" else x
    scale: float = {"scale": 3.0, "int for float": 2}.get(then, 2.0)
    added = torch.arange(4.0, device=subject.device)
    added = added.half() + 1 if then == "inner dtype" else added + 7 if then == "inner values" else added
    return {"x": x, "more": {"lora": (4.0 if then == "factor" else 0.5, added), "scale": scale}}


@contextmanager
def changed(subject: Subject, fn: Any, then: str, *, again: bool = False) -> Iterator[None]:
    """The scope of a call that changes something; a layer is changed once."""
    if again:
        pass
    elif then == "weight":
        fn.weight.data.mul_(-1)
    elif then == "rebound":
        fn.weight = nn.Parameter(fn.weight.detach() + 5, requires_grad=False)
    elif then == "cast":
        fn.double()
    elif then == "eval":
        fn.eval()
    elif then == "weight and eval":
        fn.weight.data.add_(1)
        fn.eval()
    with under(MODES_THEN.get(then, "plain"), subject.device):
        yield


def use(subject: Subject, point: Point, given: Given, captured: Any) -> Any:
    """The first call, the changed one, and the first again; views are read before the next call."""
    fn, then, found = given["fn"], point["then"], {}
    for name, how in (("first", "nothing"), ("second", then), ("third", then), ("fourth", "nothing")):
        with (
            changed(subject, fn, how if name == "second" else "nothing")
            if name != "third"
            else under(MODES_THEN.get(then, "plain"), subject.device)
        ):
            out = captured(**call_of(subject, point, how))
        found[name] = {n: x.detach().clone() for n, x in leaves(out).items()}
    return found


def expected(subject: Subject, point: Point, _: Given, __: Mapping[str, Any]) -> dict[str, Want]:
    """What the function itself gives."""
    fn = function(subject, point)
    with under(point["mode"], subject.device):
        found = use(subject, point, {"fn": fn}, fn)
    stored = {n: str(x.dtype).removeprefix("torch.") for n, x in leaves(found).items()}
    return {n: Want(plain(x, n), 0.0, stored[n]) for n, x in leaves(found).items()}


SPACE = Space("capture", factors, arguments, expected, {}, RULES, lambda _: [{"rows": 70_001}], use)
