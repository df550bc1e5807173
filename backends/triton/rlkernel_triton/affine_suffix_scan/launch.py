"""affine_suffix_scan@1 in Triton; its gradient is the same scan, run from the left.

With mu_t = a_t lambda_t what the adjoint hands on to the right, mu_t = a_t mu_{t-1} + a_t g_t on the sequences
reversed. The exclusive form hands on nu_t = a_t lambda_t + g_t instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.gradients import Pair, Saved, gradient_wanted
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall, ScanResult, sequences_of
from rlkernel_triton.affine_suffix_scan.recursion import Recursion, SequenceLayout, run
from rlkernel_triton.launchers import Plan, launcher_for


def affine_suffix_scan(call: AffineSuffixScanCall) -> ScanResult:
    """Prepare one call and run it."""
    return prepare(call)(call)


def prepare(call: AffineSuffixScanCall) -> Callable[[AffineSuffixScanCall], ScanResult]:
    """What runs calls of this shape. See `rlkernel_core.spec.affine_suffix_scan.AffineSuffixScanCall`."""
    if gradient_wanted("affine_suffix_scan", call):
        return AffineSuffixScanPair(call)
    return _Prepared(call).forward


class AffineSuffixScanPair(Pair[AffineSuffixScanCall, ScanResult]):
    """The scan, and its gradient."""

    op = "affine_suffix_scan"

    def __init__(self, call: AffineSuffixScanCall) -> None:
        """Keep what calls of this shape launch."""
        super().__init__(call)
        self._prepared = _Prepared(call)

    def forward(self, call: AffineSuffixScanCall) -> tuple[ScanResult, Saved]:
        """The result; what is saved belongs to the call."""
        result = self._prepared.forward(call)
        return result, self.saved_like(call, result, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """One scan, and where a gradient of `a` is wanted the exclusive one once more."""
        return self._prepared.backward(saved, grads, self.wanted)

    @classmethod
    def saved_like(cls, call: AffineSuffixScanCall, result: ScanResult, wanted: tuple[bool, ...]) -> Saved:
        """Tensors of the call alone."""
        del result, wanted
        return *cls.inputs(call), call.mask, call.lengths, call.cu_seqlens


class _Prepared:
    """What is done once for calls of one shape."""

    def __init__(self, call: AffineSuffixScanCall) -> None:
        self._B, self._shape, self._carry = sequences_of(call), tuple(call.b.shape), call.masked_out == "carry"
        self._a, self._exclusive = 1.0 if isinstance(call.a, Tensor) else float(call.a), call.exclusive
        self._plan = Plan(launcher_for(call.b.device))

    def forward(self, call: AffineSuffixScanCall) -> ScanResult:
        """The result."""
        a = call.a if isinstance(call.a, Tensor) else None
        rows = SequenceLayout.of(self._shape, self._B, call.mask, call.lengths, call.cu_seqlens)
        return ScanResult(*self._run(rows, call.b, a, call.init, exclusive=self._exclusive))

    def _run(
        self, rows: SequenceLayout, b: Tensor, a: Tensor | None, init: Tensor | None, *, exclusive: bool
    ) -> tuple[Tensor, Tensor]:
        """The y asked for, and that of the first token."""
        recursion = Recursion(
            "scan", rows, b, self._a if a is None else a, init=init, exclusive=exclusive, carry=self._carry
        )
        done = run(recursion, self._plan, f"exclusive={exclusive}")
        first = done.first
        if first is None:
            raise RuntimeError("a scan without a carry")
        if not rows.width:
            first = first.zero_() if init is None else first.copy_(init)
        return done.out, first

    def backward(self, saved: Saved, grads: Saved, wanted: tuple[bool, ...]) -> Saved:
        """The gradients of b, a and init."""
        b, a, init, mask, lengths, cu_seqlens = saved
        if b is None:
            raise RLKernelError("affine_suffix_scan: its backward pass got less than its forward pass saved")
        dy, dfirst = grads
        if dy is None:
            dy = torch.zeros(self._shape, dtype=torch.float32, device=b.device)
        if dfirst is None:
            dfirst = torch.zeros(self._B, dtype=torch.float32, device=b.device)
        elif dfirst.data_ptr() % 16:  # what arrives may lie anywhere, and a plan's tensors lie alike
            dfirst = dfirst.clone()
        given = SequenceLayout.of(self._shape, self._B, mask, lengths, cu_seqlens)
        valid = _valid(given, b.device)
        factor = torch.full_like(dy, self._a) if a is None else a.float()
        # What is carried through a masked token comes back through it.
        factor = torch.where(valid, factor, 1.0)
        sent = dy if self._exclusive else factor * dy
        bounds = None if given.bounds is None else given.width - given.bounds.flip(0)
        rows = SequenceLayout.of(self._shape, self._B, None if self._carry else valid.flip(-1), None, bounds)
        packed = bounds is not None
        first = dfirst.flip(0) if packed else dfirst
        recursion = Recursion("scan", rows, sent.flip(-1), factor.flip(-1), init=first, exclusive=True)
        done = run(recursion, self._plan, "backward")
        into = done.out.flip(-1)
        last = dfirst if done.first is None or not rows.width else done.first.flip(0) if packed else done.first
        grad = torch.where(valid, into if self._exclusive else dy + into, 0.0)
        d_a = None
        if a is not None and wanted[1]:
            following, _ = self._run(given, b, a, init, exclusive=True)
            d_a = torch.where(valid, grad * following, 0.0).to(a.dtype)
        return grad.to(b.dtype), d_a, None if init is None else last.to(init.dtype)


def _valid(rows: SequenceLayout, device: torch.device) -> Tensor:  # token-level bool
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
