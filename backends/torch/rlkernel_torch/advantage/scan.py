"""affine_suffix_scan@1 in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_common.row_statistics import accumulator
from rlkernel_common.row_views import shaped
from rlkernel_core.gradients import Pair, Saved, carried, gradient_wanted, recording_gradients
from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall, ScanResult, sequences_of
from rlkernel_torch.advantage.layout import Layout
from rlkernel_torch.advantage.layout import exclusive as scan_exclusive
from rlkernel_torch.advantage.layout import inclusive as scan_inclusive


def affine_suffix_scan(call: AffineSuffixScanCall) -> ScanResult:
    """See `rlkernel_core.spec.affine_suffix_scan.AffineSuffixScanCall`."""
    if gradient_wanted("affine_suffix_scan", call):
        return AffineSuffixScanPair(call)(call)
    with torch.no_grad():
        return _forward(call)


class AffineSuffixScanPair(Pair[AffineSuffixScanCall, ScanResult]):
    """The scan, and its derivative by autograd: log2(T) steps are made again, and none of them is kept."""

    op = "affine_suffix_scan"

    def __init__(self, call: AffineSuffixScanCall) -> None:
        """Keep the numbers and names of calls of this shape."""
        super().__init__(call)
        self._a = None if isinstance(call.a, Tensor) else call.a
        self._exclusive, self._masked_out = call.exclusive, call.masked_out

    def forward(self, call: AffineSuffixScanCall) -> tuple[ScanResult, Saved]:
        """The result; what is saved belongs to the call."""
        result = _forward(call)
        return result, self.saved_like(call, result, self.wanted)

    def backward(self, saved: Saved, grads: Saved) -> Saved:
        """Autograd's own, of the steps on detached tensors."""
        *inputs, mask, lengths, cu_seqlens = saved
        found: list[Tensor | None] = [None] * len(inputs)
        with recording_gradients():
            b, a, init = (
                None if x is None else x.detach().requires_grad_(wants)
                for x, wants in zip(inputs, self.wanted, strict=True)
            )
            again = AffineSuffixScanCall(
                b, self._a if a is None else a, mask=mask, lengths=lengths, cu_seqlens=cu_seqlens, init=init,  # type: ignore[arg-type]  # b is there, and a is one of the two
                exclusive=self._exclusive, masked_out=self._masked_out,
            )  # fmt: skip
            result = _forward(again)
            pairs = zip(carried(self.op, result), grads, strict=True)
            reached = [(y, g) for y, g in pairs if g is not None and y is not None and y.requires_grad]
            leaves = [x for x in (b, a, init) if x is not None and x.requires_grad]
            if reached:
                outputs, upstream = zip(*reached, strict=True)
                made = iter(torch.autograd.grad(outputs, leaves, upstream, allow_unused=True))
                found = [next(made) if x is not None and x.requires_grad else None for x in (b, a, init)]
        return tuple(found)

    @classmethod
    def saved_like(cls, call: AffineSuffixScanCall, result: ScanResult, wanted: tuple[bool, ...]) -> Saved:
        """Tensors of the call alone."""
        del result, wanted
        return *cls.inputs(call), call.mask, call.lengths, call.cu_seqlens


def _forward(call: AffineSuffixScanCall) -> ScanResult:
    """The result, in steps that autograd can record."""
    b, a, init = call.b, call.a, call.init
    sequences = sequences_of(call)
    given = [x for x in (b, a, init) if isinstance(x, Tensor)]
    state = accumulator(*given)
    layout = Layout.of(
        tuple(b.shape), sequences, b.device, mask=call.mask, lengths=call.lengths, cu_seqlens=call.cu_seqlens
    )
    rows_b = layout.rows(b.to(state))
    rows_a = layout.rows(a.to(state)) if isinstance(a, Tensor) else torch.full_like(rows_b, a)
    end = None if init is None else init.to(state)
    y = scan_inclusive(layout, rows_a, rows_b, end)
    beyond = y.new_zeros(sequences) if end is None else end
    carry = _first(layout, y, beyond).clone()
    if call.exclusive:
        y = scan_exclusive(layout, rows_a, rows_b, end)
    y = layout.select(y) if call.masked_out == "zero" else y
    return ScanResult(shaped(y, b.shape), carry)


def _first(layout: Layout, y: Tensor, beyond: Tensor) -> Tensor:  # [R, T], [B] -> [B]
    """Value at the first position of each sequence; what stands behind it where it has none."""
    if layout.starts is None or layout.ends is None:
        return y[:, 0] if layout.shape[-1] else beyond
    padded = torch.cat([y[0], y.new_zeros(1)])
    return torch.where(layout.starts < layout.ends, padded[layout.starts], beyond)
