"""qmatmul@1 on Hopper, for 4-bit weights in the layout `triton_w4`.

One product and a bias. What else an operator may be asked for is not claimed, or refused by `fits`, and left to the
portable kernels.

Legend: M tokens · K inputs · N outputs.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from rlkernel_core.quant.tensor import QuantTensor
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import LoRA, check
from rlkernel_cuda.quant import choice, launch
from rlkernel_triton.quant import storage


def fits(
    x: Tensor,
    w: QuantTensor,
    *,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_rounding: str = "any",
    ends: Tensor | None = None,
) -> Reason | None:
    """Refuses weights that are not packed or that no tile divides, and scales or a bias of another dtype than x."""
    N, K = w.shape
    if w.layout != storage.W4:
        fix = "w = rlkernel.prepack(w)"
        return Reason("shape", "unsupported", f"a weight in the layout {w.layout!r}, not {storage.W4!r}", fix)
    if w.parts["scale"].dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return Reason("shape", "unsupported", f"scales or a bias that are not {x.dtype}, as x is")
    M = x.numel() // K if K else 0
    if choice.cut(M, N, K, group=w.spec.group) is None or N * max(M, 1) >= 2**31:
        return Reason("shape", "unsupported", f"a weight [{N}, {K}] in groups of {w.spec.group} with {M} tokens")
    return None


def qmatmul(
    x: Tensor,
    w: QuantTensor,
    *,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    weight_rounding: str = "any",
    ends: Tensor | None = None,
) -> Tensor:
    """See `rlkernel_core.spec.qmatmul.qmatmul`."""
    check(
        x, w, bias=bias, lora=lora, activation=activation, residual=residual, weight_rounding=weight_rounding, ends=ends
    )
    storage.check_layouts("w", w)
    N, K = w.shape
    rows = x.detach().reshape(-1, K).contiguous()
    if rows.data_ptr() % 16:
        rows = rows.clone()
    M = rows.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if M:
        many = torch.cuda.get_device_properties(x.device).multi_processor_count
        cut = choice.cut(M, N, K, group=w.spec.group, multiprocessors=many)
        added = None if bias is None else bias.detach().contiguous()
        here = torch.cuda.current_device() == x.device.index
        with nullcontext() if here else torch.cuda.device_of(x):
            (launch.narrow if isinstance(cut, launch.Narrow) else launch.wide)(rows, w, added, y, cut)  # type: ignore[arg-type]
    return y.view(*x.shape[:-1], N)
