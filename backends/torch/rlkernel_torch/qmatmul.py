"""qmatmul in plain torch: a block of weight rows is dequantized, multiplied in fp32, finished and rounded once.

Extra memory is one fp32 copy of x, a block of the weight and its columns of the result, whatever the size of the
weight; a tiled weight is unpacked first, which costs its packed size. The backward pass saves the packed weight and
dequantizes it again, and computes h again where an activation needs it.

With experts every row is multiplied with every expert's rows and its own result is taken, which is E times the work: no
shape may depend on data. So do G low-rank additions: every row meets all of A and, without experts, all of B.

float64 x is multiplied in float64. Where torch is told to use TF32 for fp32 products, this reference does as well.
Legend: M tokens · K inputs · Nout rows of w · E experts, or 1 · R = Nout / E, or half of it for a pair · r LoRA rank ·
G low-rank additions · n rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlkernel_common.activations import ACTIVATIONS
from rlkernel_common.precision import full_precision
from rlkernel_common.row_statistics import accumulator
from rlkernel_common.row_views import shaped
from rlkernel_core.gradients import Pair, Saved, gradient_wanted, recording_gradients
from rlkernel_core.quant import convert, layouts
from rlkernel_core.quant.activations import QuantActivation, quantize_activation
from rlkernel_core.quant.codec import row_blocks
from rlkernel_core.quant.tensor import QuantMeta, QuantTensor, check_layout
from rlkernel_core.spec.qmatmul import PAIRS, QmatmulCall

Range = tuple[int, int]


def qmatmul(call: QmatmulCall) -> Tensor:  # -> [..., R]
    """See `rlkernel_core.spec.qmatmul.QmatmulCall`; "any" weight rounding is "none" here."""
    check_layout("w", call.w, layouts.KNOWN)
    return QmatmulPair(call)(call) if gradient_wanted("qmatmul", call) else _forward(call)


@dataclass(frozen=True)
class _How:
    """What a call says beside tensors."""

    meta: QuantMeta
    lora_scale: float
    activation: str | None
    rounded: bool  # the weight is rounded to the dtype of x

    @classmethod
    def of(cls, call: QmatmulCall) -> _How:
        """What one call says."""
        scale = 0.0 if call.lora is None else call.lora.scale
        return cls(call.w.flatten()[1], scale, call.activation, call.weight_rounding == "dtype")


@dataclass(frozen=True)
class _Product:
    """One call's product, block by block."""

    how: _How
    x: Tensor  # [M, K]
    bias: Tensor | None  # [Nout]
    A: Tensor | None  # [r, K], or [G, r, K]
    B: Tensor | None  # [Nout, r], or [G, Nout / E, r]
    ends: Tensor | None  # [E]
    lora_ends: Tensor | None  # [G]
    parts: list[Tensor]

    @cached_property
    def w(self) -> QuantTensor:
        """The weight in the canonical layout."""
        return layouts.unpack(QuantTensor.unflatten(self.parts, self.how.meta))

    @cached_property
    def wide(self) -> Tensor:  # [M, K]
        """The input in the dtype of accumulation."""
        return _fresh(self.x, accumulator(self.x))

    @cached_property
    def quantized(self) -> QuantActivation | None:
        """The input as the format quantizes it."""
        return None if self.w.spec.act == "none" else quantize_activation(self.wide, self.w.spec)

    @cached_property
    def left(self) -> Tensor:  # [M, K]
        """What the dequantized weight is multiplied with."""
        return self.wide if self.quantized is None else self.quantized.value().to(self.wide.dtype)

    @cached_property
    def xa(self) -> Tensor | None:  # [M, r]
        """The inner product of LoRA; 0 in rows that have none."""
        if self.A is None:
            return None
        A = _fresh(self.A, self.wide.dtype)
        if self.adapted is None:
            return self.wide @ A.t()
        found = self.wide.new_zeros(self.x.shape[0], A.shape[1])
        for mine, of_group in zip(self.adapted, A, strict=True):
            found = torch.where(mine, self.wide @ of_group.t(), found)
        return found

    @property
    def experts(self) -> int:
        """How many rows of w are cut into; E."""
        return 1 if self.ends is None else self.ends.shape[0]

    @property
    def width(self) -> int:
        """Columns of the result; R."""
        return self.how.meta.shape[0] // self.experts // (2 if self.how.activation in PAIRS else 1)

    @cached_property
    def members(self) -> Tensor | None:  # [E, M, 1]
        """Which rows of x an expert has."""
        return None if self.ends is None else _members(self.ends, self.x.shape[0])

    @cached_property
    def adapted(self) -> Tensor | None:  # [G, M, 1]
        """Which rows of x a low-rank addition is for; None: there is one, for all."""
        return self.members if self.lora_ends is None else _members(self.lora_ends, self.x.shape[0])

    def low_rank(self, rows: Range) -> list[tuple[Tensor | None, Tensor]]:
        """For rows of w: the rows of x that meet these rows [n, r] of B, or None for all that they are asked for."""
        if self.B is None:
            return []
        if self.lora_ends is None or self.adapted is None:  # rows of w belong to one expert, as do those of B
            return [(None, self.B.flatten(0, -2)[slice(*rows)])]
        return list(zip(self.adapted, self.B[:, slice(*rows)], strict=True))

    def blocks(self) -> Iterator[tuple[Range, Tensor | None, list[Range]]]:
        """Ranges of results, the rows of x they are for, and the weight rows needed: one range, or gate and value."""
        halves = (0, self.width) if self.how.activation in PAIRS else (0,)
        for expert in range(self.experts):
            start = expert * len(halves) * self.width
            mine = None if self.members is None else self.members[expert]
            for i, j in row_blocks((self.width, self.w.shape[1])):
                yield (i, j), mine, [(start + half + i, start + half + j) for half in halves]

    def weight(self, rows: Range) -> Tensor:  # [n, K]
        """Dequantized rows in the dtype of accumulation."""
        value = convert.decode_rows(self.w, *rows)
        if self.how.rounded:
            value = value.to(self.x.dtype)
        return value.to(self.wide.dtype)

    def hidden(self, rows: Range) -> Tensor:  # [M, n]
        """What goes into the activation: product, LoRA, bias."""
        h = self._exact(rows) if self.w.spec.act == "token_int8" else self.left @ self.weight(rows).t()
        xa = self.xa
        for mine, B in self.low_rank(rows) if xa is not None else ():
            more = h + self.how.lora_scale * (xa @ _fresh(B, h.dtype).t())  # type: ignore[operator]  # not None
            h = more if mine is None else torch.where(mine, more, h)
        return h if self.bias is None else h + self.bias[slice(*rows)].to(h.dtype)

    def _exact(self, rows: Range) -> Tensor:  # [M, n]
        """The integer product: float64 holds sums of 2^39 products of two 8-bit integers exactly."""
        quantized = self.quantized
        if quantized is None:
            return self.left @ self.weight(rows).t()
        codes = self.w.parts["codes"][slice(*rows)]
        total = quantized.codes.double() @ codes.double().t()
        of_rows = self.w.parts["scale"][slice(*rows)].to(self.wide.dtype)
        return total.to(self.wide.dtype) * quantized.scale * of_rows.t()

    def result(self, residual: Tensor | None) -> Tensor:  # [M, R]
        """Every block, rounded once."""
        y = self.x.new_zeros(self.x.shape[0], self.width)
        for (start, stop), mine, needed in self.blocks():
            block = self.activated([self.hidden(rows) for rows in needed])
            if residual is not None:
                block = block + residual[:, start:stop].to(block.dtype)
            y[:, start:stop] = block if mine is None else torch.where(mine, block.to(y.dtype), y[:, start:stop])
        return y

    def activated(self, hidden: list[Tensor]) -> Tensor:
        """The activation of one h, or of a gate and a value."""
        return ACTIVATIONS[self.how.activation](*hidden) if self.how.activation else hidden[0]

    def upstream(self, dy: Tensor, needed: list[Range]) -> list[Tensor]:
        """Gradients of each h of a block from that of y."""
        if self.how.activation is None:
            return [dy]
        with recording_gradients():
            hidden = [self.hidden(rows).detach().requires_grad_() for rows in needed]
            return list(torch.autograd.grad(self.activated(hidden), hidden, dy))


def _members(ends: Tensor, M: int) -> Tensor:  # ends [G] -> [G, M, 1]
    """Which of M rows each group has."""
    last = ends.clamp(0, M).cummax(0).values.unsqueeze(1)
    first = torch.nn.functional.pad(last[:-1], (0, 0, 1, 0))
    row = torch.arange(M, device=last.device)
    return ((row >= first) & (row < last)).unsqueeze(2)


def _fresh(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: BLAS may sum in another order where strides or alignment are others."""
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


@torch.no_grad()
def _forward(call: QmatmulCall) -> Tensor:  # -> [..., R]
    """The result."""
    x, lora, residual = call.x, call.lora, call.residual
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(rows.shape[0], residual.shape[-1])
    a, b = (None, None) if lora is None else (lora.A, lora.B)
    with full_precision(x):
        parts = call.w.flatten()[0]
        result = _Product(_How.of(call), rows, call.bias, a, b, call.ends, call.lora_ends, parts).result(added)
    return shaped(result, torch.Size((*x.shape[:-1], result.shape[-1])))


class QmatmulPair(Pair[QmatmulCall, Tensor]):
    """Gradients of x, bias, LoRA and residual; the weight is saved packed."""

    op = "qmatmul"

    def __init__(self, call: QmatmulCall) -> None:
        """Keep what a call says beside tensors, and the dtypes and sizes of its inputs."""
        check_layout("w", call.w, layouts.KNOWN)
        super().__init__(call)
        inputs = self.inputs(call)
        self._how, self._kinds = _How.of(call), [None if x is None else (x.dtype, x.shape) for x in inputs]

    @classmethod
    def inputs(cls, call: QmatmulCall) -> Saved:
        """The input, bias, A and B of LoRA, and residual."""
        a, b = (None, None) if call.lora is None else (call.lora.A, call.lora.B)
        return call.x, call.bias, a, b, call.residual

    def forward(self, call: QmatmulCall) -> tuple[Tensor, Saved]:
        """The result; what is saved belongs to the call."""
        return _forward(call), self.saved_like(call, call.x, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Blocks of the weight are dequantized again, and multiplied with the gradient."""
        (dy,) = grads
        x, bias, a, b, ends, lora_ends, *parts = saved
        if dy is None:
            return (None,) * len(self._kinds)
        dy = dy.reshape(-1, dy.shape[-1])
        if x is None:  # only its sizes matter
            x = dy.new_zeros(1, 1).expand(dy.shape[0], self._how.meta.shape[1])
        rows = x.reshape(-1, x.shape[-1])
        product = _Product(self._how, rows, bias, a, b, ends, lora_ends, parts)  # type: ignore[arg-type]  # all there
        found = _Gradients(product, self.wanted)
        with full_precision(dy):
            for (start, stop), mine, needed in product.blocks():
                wide = dy[:, start:stop].to(product.wide.dtype)
                for block, dh in zip(needed, product.upstream(wide, needed), strict=True):
                    found.add(block, dh, mine)
            sums = found.finished()
        if product.members is not None:
            dy = torch.where(product.members.any(0), dy, 0)
        every = (*sums, dy if self.wanted[4] else None)
        kinds = zip(every, self._kinds, strict=True)
        return tuple([None if g is None or kind is None else g.to(kind[0]).reshape(kind[1]) for g, kind in kinds])

    @classmethod
    def saved_like(cls, call: QmatmulCall, result: Tensor, wanted: tuple[bool, ...]) -> Saved:
        """Tensors of the call alone: the packed weight, and x where an activation or LoRA needs it."""
        del result, wanted
        x, bias, a, b, _ = cls.inputs(call)
        needs_x = call.activation is not None or a is not None
        return x if needs_x else None, bias, a, b, call.ends, call.lora_ends, *call.w.flatten()[0]


class _Gradients:
    """Sums of gradients in the dtype of accumulation, over blocks of weight rows."""

    def __init__(self, product: _Product, wanted: tuple[bool, ...]) -> None:
        self.product = product
        want_x, want_bias, want_a, want_b, _ = wanted
        wide, lora = product.wide, product.A is not None
        outputs = product.how.meta.shape[0]
        self.want_a = want_a
        self.x = torch.zeros_like(wide) if want_x else None  # [M, K]
        self.bias = wide.new_zeros(outputs) if want_bias else None  # [Nout]
        self.xa = wide.new_zeros(wide.shape[0], product.A.shape[-2]) if product.A is not None else None  # [M, r]
        self.b = wide.new_zeros(product.B.shape) if lora and want_b and product.B is not None else None  # as B

    def add(self, rows: Range, dh: Tensor, mine: Tensor | None) -> None:  # dh [M, n], mine [M, 1]
        """Take in the gradient of the h of some weight rows, for these rows of x."""
        product, block = self.product, slice(*rows)
        if mine is not None:
            dh = torch.where(mine, dh, 0)
        if self.x is not None and mine is not None:
            self.x = torch.where(mine, self.x + dh @ product.weight(rows), self.x)
        elif self.x is not None:
            self.x.addmm_(dh, product.weight(rows))
        if self.bias is not None:
            self.bias[block] = dh.sum(0)
        scale = product.how.lora_scale
        for g, (own, B) in enumerate(product.low_rank(rows)):
            whose = mine if own is None else own
            if self.xa is not None:
                # Not `addmm_` with alpha, which skips the product where the scale is 0, and a NaN in it.
                more = torch.add(self.xa, dh @ B.to(dh.dtype), alpha=scale)
                self.xa = more if whose is None else torch.where(whose, more, self.xa)
            if self.b is not None and product.xa is not None:
                of_b = self.b.flatten(0, -2) if own is None else self.b[g]
                of_b[block] = scale * (_only(whose, dh).t() @ _only(whose, product.xa))

    def finished(self) -> tuple[Tensor | None, ...]:
        """Gradients of x, bias, A and B."""
        a, wide = self.product.A, self.product.wide
        if self.xa is None or a is None:
            return self.x, self.bias, None, self.b
        groups = (None,) if self.product.adapted is None else self.product.adapted
        found = []
        for mine, A in zip(groups, a.unsqueeze(0) if a.dim() == 2 else a, strict=True):
            if self.x is not None and mine is not None:
                self.x = torch.where(mine, torch.addmm(self.x, self.xa, A.to(wide.dtype)), self.x)
            elif self.x is not None:
                self.x.addmm_(self.xa, A.to(wide.dtype))
            if self.want_a:
                found.append(_only(mine, self.xa).t() @ _only(mine, wide))
        return self.x, self.bias, torch.stack(found).view(a.shape) if found else None, self.b


def _only(mine: Tensor | None, x: Tensor) -> Tensor:  # mine [M, 1], x [M, C]
    """Rows of x, and 0 in those of others."""
    return x if mine is None else torch.where(mine, x, 0)
