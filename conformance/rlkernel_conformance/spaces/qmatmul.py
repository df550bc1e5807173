"""The calls of qmatmul@1.

Legend: M tokens · K inputs · Nout rows of w · E experts or adapters · R outputs of a token · r LoRA rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from hypothesis.errors import UnsatisfiedAssumption
from torch import Tensor

from rlkernel_conformance.qmatmul_calls import grid
from rlkernel_conformance.quantized_weights import MULTIPLIED, packed
from rlkernel_conformance.spaces import weights
from rlkernel_conformance.spaces.layouts import SAME_VALUES
from rlkernel_conformance.spaces.space import Argument, Given, Point, Rule, Space, Want, claimed
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import qmatmul as definition
from rlkernel_core.quant import QuantTensor, quantize
from rlkernel_core.spec.qmatmul import ACTIVATIONS, PAIRS, UNITS, LoRA, smallest_error

ROWS = ((5,), (), (1,), (2, 3), (0,), (17,), (64,), (129,))
OUTPUTS = (10, 1, 16, 33, 65)
INPUTS = (64, 1, 33, 128, 257, 300)
TALL = (4097, 8193, 65537, 262145)
WIDE = (4097, 28672, 65537)
# x, and the weight that it meets
VALUES = {
    "normal": ("normal", "graded"),
    "one sign": ("positive", "one_sided"),
    "spread": ("spread", "outliers"),
    "sparse": ("sparse", "sparse"),
    "zeros": ("zeros", "zeros"),
    "ties": ("ties", "codes"),
    "huge": ("huge", "graded"),
    "subnormal": ("subnormal", "graded"),
    "not finite": ("not finite", "not finite"),
}
# rank and scale
LORAS = ((4, 0.5), (1, -2.0), (16, 0.0), (17, 1), (0, 1.0))
# Rows of each expert, and of none after them; those of a call are these, in turn, as far as its rows go.
ENDS = {
    "ragged": (3, 2, 1000),
    "empty": (0, 4, 0, 1),
    "rest": (2, 1),
    "nobody": (0, 0),
    "one": (1000,),
    "wild": (2, 0, 1),
}


def factors(subject: Subject) -> Mapping[str, Sequence[Any]]:
    """Formats, options, sizes and values."""
    roundings = {"any": "", "none": "weight_rounding:none", "dtype": "weight_rounding:dtype"}
    return {
        "family": weights.families(subject, MULTIPLIED),
        "member": range(weights.MEMBERS),
        "rows": ROWS,
        "R": OUTPUTS,
        "K": INPUTS,
        "values": tuple(VALUES),
        "dtype": subject.dtypes,
        "w": ("quantized", "offset", "padded", "packed"),
        "activation": claimed(subject, {None: "", **{name: f"activation:{name}" for name in ACTIVATIONS}}),
        "weight_rounding": claimed(subject, roundings),
        "bias": claimed(subject, {False: "", True: "bias"}),
        "residual": claimed(subject, {False: "", True: "residual"}),
        "lora": claimed(subject, {None: "", **dict.fromkeys(LORAS, "lora")}),
        "ends": claimed(subject, {None: "", **dict.fromkeys(ENDS, "grouped")}),
        "adapters": claimed(subject, {None: "", **dict.fromkeys(("of experts", *ENDS), "grouped_lora")}),
    }


RULES = (
    Rule(("rows", "ends"), lambda rows, ends: ends is None or len(rows) == 1),  # [M, K] with ends
    Rule(("rows", "adapters"), lambda rows, adapters: adapters is None or len(rows) == 1),
    Rule(("lora", "adapters"), lambda lora, adapters: adapters is None or lora is not None),
    Rule(("ends", "adapters"), lambda ends, adapters: adapters is None or (adapters in ENDS) == (ends is None)),
    # each expert has its own
    Rule(("lora", "ends", "adapters"), lambda lora, ends, adapters: None in {lora, ends} or adapters == "of experts"),
)


def x_of(point: Point, M: int, K: int) -> Tensor:
    """[M, K]."""
    g, kind, values = point.generator(1), getattr(torch, point["dtype"]), VALUES[point["values"]][0]
    x = torch.randn(M, K, generator=g, dtype=torch.float64)
    if values == "positive":
        x = x.abs() + 0.1
    elif values == "spread":
        x = x * torch.exp2(torch.arange(K).remainder(9) - 4.0)
    elif values == "sparse":
        x = torch.where(x.abs() < 1, 0, x)
    elif values == "zeros":
        x[::2], x[1::4] = -0.0, 0.0
    elif values == "ties":  # of tokens in 8 bits, and in blocks of 128
        x = torch.randint(-254, 255, (M, K), generator=g).double() / 2
        x[:, ::128] = 127
    elif values == "huge":
        x = x * (1e3 if kind == torch.float16 else 1e9)
    elif values == "subnormal":
        x = x * (2.0**-18 if kind == torch.float16 else 2.0**-130)
    elif values == "not finite" and M:
        x[0, -1] = torch.nan
    return x.to(kind)


def w_of(subject: Subject, point: Point, outputs: int, inputs: int) -> QuantTensor:
    """The canonical weight, quantized by the definition of its format."""
    full = weights.weight(VALUES[point["values"]][1], outputs, inputs, point.generator(2))
    return quantize(full, weights.spec(subject, MULTIPLIED, point))


def sizes(subject: Subject, point: Point) -> tuple[tuple[int, ...], int, int]:
    """Leading sizes of x, rows of w and its columns, on a grid that the subject takes."""
    spec = weights.spec(subject, MULTIPLIED, point)
    found = grid(subject, spec, point["dtype"])
    if found is None:
        raise UnsatisfiedAssumption(f"{subject.backend}'s check admits no product of {spec}")
    rows, columns, tokens = found
    experts = len(ENDS[point["ends"]]) if point["ends"] else 1
    outputs = point["R"] * (2 if point["activation"] in PAIRS else 1) * experts
    lead = point["rows"]
    if tokens > 1 and math.prod(lead) < tokens:
        lead = (*lead[:-1], tokens)
    return lead, -(-outputs // rows) * rows, -(-point["K"] // columns) * columns


def ends_of(level: str, M: int) -> Tensor:
    """Where rows of experts or adapters end: as the level says, or in a wild way."""
    ends = torch.tensor(ENDS[level]).cumsum(0).clamp(max=M).int()
    if level == "wild":
        ends[1], ends[2] = -(2**31), 2**31 - 1
    return ends


def arguments(subject: Subject, point: Point) -> Given:
    """The call."""
    lead, outputs, inputs = sizes(subject, point)
    M, device = math.prod(lead), subject.device
    width = outputs // (2 if point["activation"] in PAIRS else 1)
    width //= len(ENDS[point["ends"]]) if point["ends"] else 1

    def normal(*shape: int, salt: int) -> Tensor:
        return torch.randn(shape, generator=point.generator(salt), dtype=torch.float64).to(device)

    w = w_of(subject, point, outputs, inputs).to(device)
    if point["w"] == "packed":
        w = next(packed(subject, w), w)
    elif point["w"] != "quantized":
        w = weights.placed(w, point["w"])
    given: Given = {"x": x_of(point, M, inputs).view(*lead, inputs).to(device), "w": w}
    given |= {"activation": point["activation"]} if point["activation"] else {}
    given |= {"weight_rounding": point["weight_rounding"]} if point["weight_rounding"] != "any" else {}
    given |= {"bias": 3 * normal(outputs, salt=3)} if point["bias"] else {}
    given |= {"residual": 3 * normal(*lead, width, salt=4)} if point["residual"] else {}
    if point["lora"]:
        r, scale = point["lora"]
        several = ENDS[point["ends"] or point["adapters"]] if point["adapters"] else ()
        of_one = outputs // len(several) if point["ends"] else outputs
        shape = (len(several),) if several else ()
        given["lora"] = LoRA(normal(*shape, r, inputs, salt=5), normal(*shape, of_one, r, salt=6), scale)
    given |= {"ends": ends_of(point["ends"], M).to(device)} if point["ends"] else {}
    given |= {"lora_ends": ends_of(point["adapters"], M).to(device)} if point["adapters"] in ENDS else {}
    return given


def _rows(x: Tensor) -> Tensor:  # [..., C] -> [M, C]
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def spans(ends: Tensor | None, M: int) -> Iterator[tuple[slice, int]]:
    """Rows of x of each expert or adapter, and its number; all of the first where there are none."""
    if ends is None:
        yield slice(0, M), 0
        return
    before = 0
    for group, end in enumerate(ends.tolist()):
        last = max(before, min(end, M))
        yield slice(before, last), group
        before = last


def meetings(cpu: Given, M: int, outputs: int) -> Iterator[tuple[slice, slice, int | None]]:
    """Rows of x, rows of w that they meet, and which low-rank addition they have, if there are several."""
    ends, apart = cpu.get("ends"), cpu.get("lora_ends")
    size, last = outputs // (1 if ends is None else len(ends)), 0
    for rows, group in spans(ends if apart is None else apart, M):
        expert = group if apart is None else 0
        yield rows, slice(expert * size, (expert + 1) * size), group
        last = rows.stop
    if apart is not None:
        yield slice(last, M), slice(0, outputs), None


def expected(subject: Subject, point: Point, given: Given, upstream: Mapping[str, Any]) -> dict[str, Want]:
    """The definition on the rows of each expert or adapter, or on all."""
    cpu: dict[str, Any] = {n: x.cpu() for n, x in given.items() if isinstance(x, Tensor)}
    lora, x = given.get("lora"), _rows(cpu["x"])
    outputs, activation, bias = given["w"].shape[0], given.get("activation"), cpu.get("bias")
    residual = _rows(cpu["residual"]).double() if "residual" in cpu else None
    low = None if lora is None else [m.cpu() if m.dim() == 3 else m.cpu().unsqueeze(0) for m in (lora.A, lora.B)]
    whole = definition.exact(x, w_of(subject, point, *given["w"].shape), rounding=point["weight_rounding"], bias=bias)
    dy = _rows(torch.from_numpy(upstream[""])) if upstream else None
    width = outputs // (1 if "ends" not in cpu else len(cpu["ends"])) // (2 if activation in PAIRS else 1)
    y = torch.zeros(2, x.shape[0], width, dtype=torch.float64)  # values, bounds
    grads = _Gradients(whole, residual, low)
    for rows, of_w, group in meetings(cpu, x.shape[0], outputs):
        own = (
            None if lora is None or low is None or group is None else (low[0][group], low[1][group], float(lora.scale))
        )
        one = definition.part(whole, rows, of_w, activation=activation, residual=residual, lora=own)
        y[:, rows] = torch.stack((one.y, one.bound()))
        if dy is not None:
            grads.add(rows, of_w, group, one, dy[rows])
    lead = given["x"].shape[:-1]
    found = {"": Want(y[0].view(*lead, width).numpy(), y[1].view(*lead, width).numpy(), point["dtype"])}
    if dy is not None:
        found |= grads.wanted(given)
    return found


class _Gradients:
    """Gradients of all arguments in float64, and how far others may be: [2, ...] each, values and bounds."""

    def __init__(self, whole: definition.Exact, residual: Tensor | None, low: list[Tensor] | None) -> None:
        shapes: dict[str, Any] = {"x": whole.x, "bias": whole.w[:, 0]}
        shapes |= {"A": low[0], "B": low[1]} if low else {}
        shapes |= {"residual": residual} if residual is not None else {}
        self.found = {name: torch.zeros(2, *x.shape, dtype=torch.float64) for name, x in shapes.items()}

    def add(self, rows: slice, of_w: slice, group: int | None, one: definition.Exact, dy: Tensor) -> None:
        """Take in the rows of an expert or adapter."""
        leaf = one.h.detach().clone().requires_grad_()
        (dh,) = torch.autograd.grad(definition.activated(leaf, one.activation), leaf, dy)
        bounds, found = definition.bounds_of_gradients(one, dy), self.found
        dx = dh @ one.w
        if one.lora is not None:
            a, b, s = one.lora
            dx = dx + s * (dh @ b) @ a
            found["A"][:, group] += torch.stack((s * (dh @ b).t() @ one.x, bounds["A"]))
            found["B"][:, group] += torch.stack((s * dh.t() @ (one.x @ a.t()), bounds["B"]))
        found["x"][:, rows] = torch.stack((dx, bounds["x"]))
        found["bias"][:, of_w] += torch.stack((dh.sum(0), bounds["bias"]))
        if "residual" in found:
            found["residual"][0, rows] = dy

    def wanted(self, given: Given) -> dict[str, Want]:
        """In the dtypes and shapes of the arguments, one rounding to a dtype further away."""
        lora = given.get("lora")
        like = {"x": given["x"], "bias": given.get("bias"), "residual": given.get("residual")}
        like |= {"lora.A": lora.A, "lora.B": lora.B} if lora is not None else {}
        named = {}
        for name, x in like.items():
            if x is not None:
                kind = str(x.dtype).removeprefix("torch.")
                value, bound = (t.view(x.shape) for t in self.found[name.removeprefix("lora.")])
                allowed = bound + UNITS[kind] * (value.abs() + bound) + smallest_error(UNITS[kind])
                named[f"d_{name}"] = Want(value.numpy(), allowed.numpy(), kind)
        return named


def real(subject: Subject) -> list[Mapping[str, Any]]:
    """Every format at the lengths of real models; many rows of x, and many of w: the smallest of these come first."""
    every = weights.every(subject, MULTIPLIED)
    long = [{**kind, "K": K, "rows": (2,), "R": 2} for kind, K in weights.lengths(every)]
    tall = [{**kind, "K": 64, "rows": (M,), "R": 3} for kind, M in zip(every[::11], TALL, strict=False)]
    wide = [{**kind, "K": 64, "rows": (2,), "R": R} for kind, R in zip(every[1::11], WIDE, strict=False)]
    return [*tall[:1], *wide[:1], *long, *tall[1:], *wide[1:]]


FLOATS = ("float32", "float64", "bfloat16", "float16")
_WITH_LORA = Rule(("lora",), lambda lora: lora is not None)
TENSORS = {
    "x": Argument(),
    "bias": Argument(dtypes=FLOATS, given=Rule(("bias",), bool)),
    "residual": Argument(dtypes=FLOATS, given=Rule(("residual",), bool)),
    "lora.A": Argument(dtypes=FLOATS, given=_WITH_LORA),
    "lora.B": Argument(dtypes=FLOATS, given=_WITH_LORA),
    "ends": Argument(SAME_VALUES, given=Rule(("ends",), lambda ends: ends is not None)),
    "lora_ends": Argument(SAME_VALUES, given=Rule(("adapters",), lambda adapters: adapters in ENDS)),
}
SPACE = Space("qmatmul", factors, arguments, expected, TENSORS, RULES, real)
