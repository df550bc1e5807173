"""qmatmul@1 from its definition in float64, with gradients by autograd; and how far a result may be from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlkernel_core.definitions import quant, quantize
from rlkernel_core.spec.qmatmul import UNITS, accumulation_bound, smallest_error

STEEP = 1.2  # above every |act'| and |act''| but that of relu
PAIRS = {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}


def activated(h, name):
    if name in PAIRS:
        gate, value = h.chunk(2, 1)
        return activated(gate, PAIRS[name]) * value
    if name == "relu":
        return h.clamp(min=0)
    if name == "silu":
        return h / (1 + torch.exp(-h.clamp(min=-700)))  # no inf in its derivative
    if name == "gelu":
        return h * (1 + torch.erf(h / 2**0.5)) / 2
    if name == "gelu_tanh":
        return h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3))) / 2
    return h


@dataclass
class Exact:
    """A call in float64. x [M, K] as it came, w the format's value [N, K]."""

    x: Tensor
    w: Tensor
    left: Tensor  # x as the format quantizes it, gradients passing through
    slack: Tensor  # what another right code of x may change, [M, K]
    h: Tensor
    y: Tensor
    unit: float
    rounding: str
    lora: tuple[Tensor, Tensor, float] | None
    added: Tensor | float  # |bias|, [N]
    after: Tensor | float  # |residual|
    activation: str | None
    integers: bool

    @property
    def reach(self):
        return self.left.detach().abs() @ self.w.abs().t() + self.added

    @property
    def lora_reach(self):
        if self.lora is None:
            return 0.0
        a, b, s = self.lora
        return abs(s) * (self.x.detach().abs() @ a.detach().abs().t()) @ b.detach().abs().t()

    def bound_of_hidden(self):
        """Of h, before any rounding of y."""
        inner, lora_reach = self.x.shape[1], self.lora_reach
        summed = accumulation_bound(
            0.0, self.reach, unit=self.unit, inner=inner, weight_rounding=self.rounding, lora_reach=lora_reach
        )
        return summed + self.slack @ self.w.abs().t()

    def bound(self):
        """Of y: that of h through the activation, the residual, one rounding."""
        error, y = self.bound_of_hidden(), self.y.detach().abs()
        fine = 2.0**-20 if self.unit > UNITS["float64"] else 2.0**-46
        if self.activation in PAIRS:
            gate, value = self.h.detach().chunk(2, 1)
            of_gate, of_value = error.chunk(2, 1)
            of_gate = STEEP * of_gate + fine * gate.abs()
            size = activated(gate, PAIRS[self.activation]).abs()
            error = of_gate * (value.abs() + of_value) + size * of_value
        elif self.activation:
            error = STEEP * error + fine * self.h.detach().abs()
        unit = self.unit + 2.0**-22 * (fine > 2.0**-40)
        return error + unit * (y + error) + fine / 4 * self.after + smallest_error(self.unit)


def exact(x, w, *, rounding="any", bias=None, lora=None, activation=None, residual=None):
    """Expected y and the bound around it; tensors on the CPU, `lora` a triple (A, B, scale)."""
    spec, dtype = w.spec, str(x.dtype).removeprefix("torch.")
    w = w.to("cpu")
    if spec.act == "token_int8":  # exact sums of integers, then scales: there is no w' to round
        value = quant.integers(w).double() * quant.spread(w, w.parts["scale"]).double()
    else:
        value = quant.decode(w)
        value = (value.to(x.dtype) if rounding == "dtype" else value).double()
    wide = x.double()
    left, slack = wide, torch.zeros_like(wide)
    if spec.act != "none":
        kind = x.detach() if dtype == "float64" else x.detach().float()
        codes, off, _ = quantize.activation(kind.numpy(), spec)
        left = wide + (torch.from_numpy(codes) - wide).detach()
        slack = torch.from_numpy(off)
    h = left @ value.t()
    if lora is not None:
        h = h + lora[2] * (wide @ lora[0].double().t()) @ lora[1].double().t()
    if bias is not None:
        h = h + bias.double()
    y = activated(h, activation)
    if residual is not None:
        y = y + residual.double()
    matrices = None if lora is None else (lora[0].double(), lora[1].double(), lora[2])
    added = 0.0 if bias is None else bias.detach().double().abs()
    after = 0.0 if residual is None else residual.detach().double().abs()
    return Exact(
        wide,
        value,
        left,
        slack,
        h,
        y,
        UNITS[dtype],
        rounding,
        matrices,
        added,
        after,
        activation,
        spec.act == "token_int8",
    )


def part(whole: Exact, rows, of_w=slice(None), *, activation=None, residual=None, lora=None):
    """Rows of x that meet rows of w only, as those of one expert, and a low-rank addition that only they have.

    `whole` is the call without an activation, a residual and such additions.
    """
    mine = {"x": whole.x[rows], "left": whole.left[rows], "slack": whole.slack[rows], "w": whole.w[of_w]}
    h, matrices, after = whole.h[rows, of_w], whole.lora, 0.0
    if lora is not None:
        matrices = (lora[0].double(), lora[1].double(), lora[2])
        h = h + lora[2] * (mine["x"] @ matrices[0].t()) @ matrices[1].t()
    y = activated(h, activation)
    if residual is not None:
        after = residual[rows].detach().double().abs()
        y = y + residual[rows].double()
    added = whole.added[of_w] if isinstance(whole.added, Tensor) else 0.0
    return replace(whole, **mine, h=h, y=y, lora=matrices, added=added, after=after, activation=activation)


def bounds_of_gradients(e: Exact, dy):
    """Name -> how far a gradient may be: of x, bias, A, B.

    Sums are fp32 or better; x A^T, w' and dh may be rounded to the dtype of x on the way, and dh depends on h. Where h
    is within its error of 0, or NaN, relu may let a gradient through or not.
    """
    error, h, dy = e.bound_of_hidden(), e.h.detach(), dy.double()
    leaf = h.clone().requires_grad_()
    (dh,) = torch.autograd.grad(activated(leaf, e.activation), leaf, dy)
    if e.activation in PAIRS:
        value = h.chunk(2, 1)[1]
        of_gate, of_value = error.chunk(2, 1)
        bent = torch.cat((of_gate * (value.abs() + of_value) + of_value, of_gate), 1)
        off = STEEP * bent * dy.abs().repeat(1, 2)
    elif e.activation == "relu":
        off = torch.where(h.abs() > error, 0, dy.abs())
    elif e.activation:
        off = STEEP * error * dy.abs()
    else:
        off = torch.zeros_like(h)
    summed = accumulation_bound(0.0, 1.0, unit=e.unit, inner=max(*e.w.shape, h.shape[0]), weight_rounding="none")
    off = off + (3 * e.unit + 3 * summed) * (dy if e.activation == "relu" else dh).abs()
    # Where x is quantized to integers, w' = fl32(q s) does for the gradient.
    found = {"x": off @ e.w.abs() + 2.0**-23 * e.integers * dh.abs() @ e.w.abs(), "bias": off.sum(0)}
    if e.lora is not None:
        a, b, s = (abs(t) if isinstance(t, float) else t.detach().abs() for t in e.lora)
        found["x"] = found["x"] + s * (off @ b) @ a
        found["A"] = s * (off @ b).t() @ e.x.detach().abs()
        found["B"] = s * off.t() @ (e.x.detach().abs() @ a.t())
    return {name: bound + smallest_error(e.unit) for name, bound in found.items()}
