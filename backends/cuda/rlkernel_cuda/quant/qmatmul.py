"""qmatmul@1 on Hopper, for int4 weights in the layout `triton_w4` and, with few tokens, weights of 8 bits.

A product and a bias. What else the operator may be asked for is not claimed, or refused by `fits`, and left to the
portable kernels.

Legend: M tokens · K inputs · N outputs.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.quant.tensor import CANONICAL
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_cuda.quant import choice, launch
from rlkernel_triton.quant import storage


def fits(call: QmatmulCall) -> Reason | None:
    """Refuses weights that are not packed or that no tile divides, and scales or a bias of another dtype."""
    x, w = call.x, call.w
    if w.layout not in storage.KNOWN:
        return None  # an error of the call, which says so
    (N, K), integers = w.shape, w.spec.element == "int4"
    layout = storage.W4 if integers else CANONICAL
    if w.layout != layout:
        fix = f"w = rlkernel.prepack(w, layout={layout!r})"
        return Reason("shape", "unsupported", f"a weight in the layout {w.layout!r}, not {layout!r}", fix)
    scales = x.dtype if integers else torch.float32
    if w.parts["scale"].dtype != scales or (call.bias is not None and call.bias.dtype != x.dtype):
        return Reason("shape", "unsupported", f"scales that are not {scales}, or a bias that is not {x.dtype}")
    M = x.numel() // K
    if choice.cut(M, w) is None or N * max(M, 1) >= 2**31 or not all(p.is_contiguous() for p in w.parts.values()):
        return Reason("shape", "unsupported", f"{w.spec} of {w.shape} with {M} tokens")
    return None


def qmatmul(call: QmatmulCall) -> Tensor:
    """See `rlkernel_core.spec.qmatmul.QmatmulCall`."""
    x, w = call.x, call.w
    storage.check_layouts("w", w)
    N, K = w.shape
    rows = x.detach().reshape(-1, K).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    M = rows.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        cut = choice.cut(M, w, torch.cuda.get_device_properties(x.device).multi_processor_count)
        if cut is None:
            raise RLKernelError(f"The cuda backend multiplies {M} tokens by no weight {w.spec} of {w.shape}.")
        added = None if call.bias is None else call.bias.detach().contiguous()
        here = torch.cuda.current_device() == x.device.index
        with nullcontext() if here else torch.cuda.device_of(x):
            launch.product(rows, w, added, y, cut)
    return y.view(*x.shape[:-1], N)
