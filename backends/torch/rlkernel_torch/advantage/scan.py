"""affine_suffix_scan@1 in plain torch; differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkernel_core.spec.affine_suffix_scan import AffineSuffixScanCall, ScanResult, sequences_of
from rlkernel_torch.advantage.layout import Layout
from rlkernel_torch.advantage.layout import exclusive as scan_exclusive
from rlkernel_torch.advantage.layout import inclusive as scan_inclusive


def affine_suffix_scan(call: AffineSuffixScanCall) -> ScanResult:
    """See `rlkernel_core.spec.affine_suffix_scan.AffineSuffixScanCall`."""
    b, a, init = call.b, call.a, call.init
    sequences = sequences_of(call)
    given = [x for x in (b, a, init) if isinstance(x, Tensor)]
    state = torch.float64 if any(x.dtype == torch.float64 for x in given) else torch.float32
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
    return ScanResult(layout.tokens(layout.select(y) if call.masked_out == "zero" else y), carry)


def _first(layout: Layout, y: Tensor, beyond: Tensor) -> Tensor:  # [R, T], [B] -> [B]
    """Value at the first position of each sequence; what stands behind it where it has none."""
    if layout.starts is None or layout.ends is None:
        return y[:, 0] if layout.shape[-1] else beyond
    padded = torch.cat([y[0], y.new_zeros(1)])
    return torch.where(layout.starts < layout.ends, padded[layout.starts], beyond)
