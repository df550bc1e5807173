"""affine_suffix_scan@1 in Triton; its gradient is the same scan, run from the left.

With mu_t = a_t lambda_t what the adjoint hands on to the right, mu_t = a_t mu_{t-1} + a_t g_t on the sequences
reversed. The exclusive form hands on nu_t = a_t lambda_t + g_t instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlkernel_core.reasons import Reason
from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall, ScanResult, sequences_of
from rlkernel_triton.launchers import Plan, launcher_for
from rlkernel_triton.recursion import Rows, run


@dataclass(frozen=True)
class _Scan:
    rows: Rows
    a: float | None  # None: a tensor
    exclusive: bool
    carry: bool
    plan: Plan

    def run(self, b: Tensor, a: Tensor | None, init: Tensor | None, *, exclusive: bool) -> tuple[Tensor, Tensor]:
        """The y asked for, and that of the first token."""
        factor = a if a is not None else 1.0 if self.a is None else self.a
        done = run(
            "scan", self.rows, b=b, a=factor, init=init, exclusive=exclusive, carry=self.carry, plan=self.plan,
            place=f"exclusive={exclusive}",
        )  # fmt: skip
        first = done.first
        if first is None:
            raise RuntimeError("a scan without a carry")
        if not self.rows.width:
            first = first.zero_() if init is None else first.copy_(init)
        return done.out, first


def affine_suffix_scan(call: AffineSuffixScanCall) -> ScanResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: AffineSuffixScanCall) -> Callable[[AffineSuffixScanCall], ScanResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.affine_suffix_scan.AffineSuffixScanCall`."""
    B, shape, carry = sequences_of(call), tuple(call.b.shape), call.masked_out == "carry"
    factor = call.a if isinstance(call.a, Tensor) else None
    number = None if isinstance(call.a, Tensor) else float(call.a)
    plan = Plan(launcher_for(call.b.device))
    wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (call.b, factor, call.init))

    def run(call: AffineSuffixScanCall) -> ScanResult:
        b, init, exclusive = call.b, call.init, call.exclusive
        a = call.a if isinstance(call.a, Tensor) else None
        scan = _Scan(Rows.of(shape, B, call.mask, call.lengths, call.cu_seqlens), number, exclusive, carry, plan)
        if wanted:
            y, first = _Scanned.apply(b, a, init, scan)  # type: ignore[no-untyped-call]
        else:
            y, first = scan.run(b, a, init, exclusive=exclusive)
        return ScanResult(y, first)

    return run


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, b: Tensor, a: Tensor | None, init: Tensor | None, scan: _Scan) -> tuple[Tensor, Tensor]:
        ctx.scan = scan
        ctx.save_for_backward(b, a, init)
        return scan.run(b, a, init, exclusive=scan.exclusive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dfirst: Tensor) -> tuple[Tensor | None, ...]:
        b, a, init = ctx.saved_tensors
        scan: _Scan = ctx.scan
        valid = _valid(scan.rows, b.device)
        factor = torch.full_like(dy, 1.0 if scan.a is None else scan.a) if a is None else a.float()
        # What is carried through a masked token comes back through it.
        factor = torch.where(valid, factor, 1.0)
        sent = dy if scan.exclusive else factor * dy
        rows = Rows.of(
            scan.rows.shape,
            scan.rows.sequences,
            None if scan.carry else valid.flip(-1),
            None,
            None if scan.rows.bounds is None else scan.rows.width - scan.rows.bounds.flip(0),
        )
        packed = rows.bounds is not None
        done = run(
            "scan",
            rows,
            b=sent.flip(-1),
            a=factor.flip(-1),
            init=dfirst.flip(0) if packed else dfirst,
            exclusive=True,
        )
        into = done.out.flip(-1)
        last = dfirst if done.first is None or not rows.width else done.first.flip(0) if packed else done.first
        grad = torch.where(valid, into if scan.exclusive else dy + into, 0.0)
        d_a = None
        if a is not None and ctx.needs_input_grad[1]:
            following, _ = scan.run(b, a, init, exclusive=True)
            d_a = torch.where(valid, grad * following, 0.0).to(a.dtype)
        return grad.to(b.dtype), d_a, None if init is None else last.to(init.dtype), None


def _valid(rows: Rows, device: torch.device) -> Tensor:  # token-level bool
    """The tokens that count."""
    at = torch.arange(rows.width, device=device)
    if rows.bounds is not None:
        inside = (at >= rows.bounds[0]) & (at < rows.bounds[-1])
    else:
        inside = at.expand(rows.shape) < (rows.width if rows.ends is None else rows.ends[:, None])
    return inside if rows.mask is None else inside & rows.mask.view(torch.bool)


def fits(call: AffineSuffixScanCall) -> Reason | None:
    """The state is fp32: a call with a float64 tensor is for another implementation."""
    return refused_float64({"b": call.b, "a": call.a, "init": call.init})


def refused_float64(arguments: dict[str, Any]) -> Reason | None:
    """A reason where one of them is float64."""
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            text = f"{name} is float64, and the kernels keep their state in float32"
            return Reason("shape", "unsupported", text, f"Pass {name}.float().")
    return None
