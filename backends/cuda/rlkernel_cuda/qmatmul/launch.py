"""qmatmul@1 on Hopper, for int4 weights in the layout `triton_w4` and, with few tokens, weights of 8 bits.

A product and a bias. What else the operator may be asked for is not claimed, or refused by `fits`, and left to the
portable kernels.

Legend: M tokens · K inputs · N outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.quant.tensor import CANONICAL
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_cuda.qmatmul import choice, kernels
from rlkernel_triton.quant import formats, layouts


def fits(call: QmatmulCall) -> Reason | None:
    """Refuses weights that are not packed or that no tile divides, and scales or a bias of another dtype."""
    x, w = call.x, call.w
    if w.layout not in layouts.KNOWN:
        return None  # an error of the call, which says so
    (N, K), integers = w.shape, w.spec.element == "int4"
    layout = formats.W4 if integers else CANONICAL
    if w.layout != layout:
        fix = f"w = rlkernel.prepack(w, layout={layout!r})"
        return Reason("shape", "unsupported", f"a weight in the layout {w.layout!r}, not {layout!r}", fix)
    scales = x.dtype if integers else torch.float32
    if w.parts["scale"].dtype != scales or (call.bias is not None and call.bias.dtype != x.dtype):
        return Reason("shape", "unsupported", f"scales that are not {scales}, or a bias that is not {x.dtype}")
    if any(p.data_ptr() % 16 for p in w.parts.values()):
        fix = "Clone that part of the weight."
        return Reason("shape", "unsupported", "a weight with a part that begins at no multiple of 16 bytes", fix)
    M = x.numel() // K
    if choice.cut(M, w) is None or N * max(M, 1) >= 2**31 or not all(p.is_contiguous() for p in w.parts.values()):
        return Reason("shape", "unsupported", f"{w.spec} of {w.shape} with {M} tokens")
    return None


def prepare(call: QmatmulCall) -> Callable[[QmatmulCall], Tensor]:
    """What multiplies for calls of this shape. See `rlkernel_core.spec.qmatmul.QmatmulCall`.

    Raises:
        RLKernelError: no kernel here takes the call.
    """
    x, w = call.x, call.w
    layouts.check_layout("w", w)
    (N, K), device, dtype = w.shape, x.device, x.dtype
    M, out = x.numel() // K, (*x.shape[:-1], N)
    if not M:
        return lambda _: torch.empty(out, dtype=dtype, device=device)
    cut = choice.cut(M, w, torch.cuda.get_device_properties(device).multi_processor_count)
    if cut is None:
        raise RLKernelError(f"The cuda backend multiplies {M} tokens by no weight {w.spec} of {w.shape}.")
    product = kernels.Product(M, dtype, w, cut, device)
    as_it_is = x.is_contiguous() and x.data_ptr() % 16 == 0
    bias_as_it_is = call.bias is None or call.bias.is_contiguous()

    def run(call: QmatmulCall) -> Tensor:
        rows, bias = call.x, call.bias
        if not as_it_is:
            rows = rows.detach().clone(memory_format=torch.contiguous_format)
        if not bias_as_it_is:
            bias = bias.detach().contiguous()  # type: ignore[union-attr]  # it is there
        y = torch.empty(out, dtype=dtype, device=device)
        product(rows, call.w, bias, y)
        return y

    return run


def qmatmul(call: QmatmulCall) -> Tensor:
    """Prepare one call and run it."""
    return prepare(call)(call)
