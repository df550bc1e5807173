"""qmatmul@1 by FlashInfer on Hopper: e4m3 weights in blocks of 128 x 128, tokens in blocks of 128 columns.

FlashInfer carries DeepGEMM: a tensor-core product of the codes, 128 columns at a time, whose sums are scaled and added
in fp32. Its own quantizer of tokens multiplies with an approximate 448 / max where the contract divides by max / 448,
so tokens are coded here. Fp8 sums of Hopper's tensor cores keep about 14 bits, which is within
what a rounded bf16 weight is allowed (`weight_rounding="any"`) and not within the others, which are not claimed.

Legend: M tokens (any leading shape) · K inputs · N outputs. Imports torch, and FlashInfer where a call is asked about.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from rlkernel_core.environment import variable
from rlkernel_core.errors import CaptureError, RLKernelError
from rlkernel_core.quant import quantize
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import CANONICAL
from rlkernel_core.reasons import Reason
from rlkernel_core.spec.qmatmul import QmatmulCall
from rlkernel_triton.quant import layouts

BLOCK: Final = 128
_MULTIPLE: Final = 4  # TMA reads rows of 16 bytes
_MODULE, _RUNNER = "flashinfer.gemm.gemm_base", "get_fp8_blockscale_gemm_runner_sm90"
_built: set[tuple[object, ...]] = set()  # what has been compiled and run in this process


def _compiler() -> str | None:
    """The nvcc that DeepGEMM calls for each kernel: as its compiler.cuh looks for it."""
    named = variable("TRTLLM_DG_NVCC_COMPILER")
    if named is None and (home := variable("CUDA_HOME")):
        named = str(Path(home) / "bin" / "nvcc")
    return shutil.which(named or "nvcc")


class Runner(NamedTuple):
    """FlashInfer's products, or why there are none."""

    made: Any = None
    workspace: Tensor | None = None  # kept: the runner holds its address, and would use it for tokens of its own coding
    said: str = ""
    fix: str = ""


@cache
def runner(device: torch.device) -> Runner:
    """Loads FlashInfer, whose module is built the first time on a machine, for minutes."""
    if _compiler() is None:
        said = "FlashInfer compiles each of its fp8 products with nvcc, which is not found"
        return Runner(said=said, fix="install the CUDA toolkit and set CUDA_HOME, or TRTLLM_DG_NVCC_COMPILER")
    try:
        made = getattr(import_module(_MODULE), _RUNNER)()
        workspace = torch.empty(16, dtype=torch.uint8, device=device)
        made.configure_workspace(workspace)
    except AttributeError as error:
        return Runner(said=f"FlashInfer is not as it was in 0.7.2: {error}", fix="pip install flashinfer-python==0.7.2")
    except (
        ImportError,
        RuntimeError,
        ValueError,
        OSError,
    ) as error:  # what its import and its builds are known to raise
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return Runner(said=f"FlashInfer cannot be loaded or built here: {text}", fix="leave it out of the order")
    return Runner(made, workspace)


def fits(call: QmatmulCall) -> Reason | None:
    """Refuses other layouts, weights that its tiles do not divide, and a FlashInfer that cannot be built here."""
    w = call.w
    said, fix = "", ""
    if w.layout not in layouts.KNOWN:
        return None  # an error of the call, which says so
    if w.layout != CANONICAL:
        said, fix = f"the weight is packed as {w.layout!r}", "use it as quantize made it"
    elif w.spec.act == "none":
        said = "FlashInfer multiplies tokens of 8 bits"
        fix = 'quantize with QuantSpec.named("fp8_block128", act="block128_fp8")'
    elif w.shape[0] % BLOCK or w.shape[1] % BLOCK:
        said, fix = f"a weight of {w.shape[0]} x {w.shape[1]}", f"multiples of {BLOCK}"
    elif not all(part.is_contiguous() for part in w.parts.values()) or w.parts["codes"].data_ptr() % 16:
        said = "a weight that is not contiguous, or not at a multiple of 16 bytes"
    else:
        _, _, said, fix = runner(call.x.device)
    return Reason("shape", "unsupported", said, fix) if said else None


def prepare(call: QmatmulCall) -> Callable[[QmatmulCall], Tensor]:
    """What multiplies for calls of this shape.

    See `rlkernel_core.spec.qmatmul.QmatmulCall`; the claims leave out every option but the format.

    Raises:
        RLKernelError: FlashInfer is not as `fits` wants it.
    """
    x, w = call.x, call.w
    layouts.check_layout("w", w)
    (N, K), device, dtype = w.shape, x.device, x.dtype
    M, out, found = x.numel() // K, (*x.shape[:-1], N), runner(x.device)
    if found.made is None:
        raise RLKernelError(f"{found.said}: {found.fix}.")
    kind = (device, M, N, K)

    def run(call: QmatmulCall) -> Tensor:
        x, w = call.x, call.w
        y = torch.empty(out, dtype=dtype, device=device)
        if kind not in _built and x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise CaptureError(
                "FlashInfer compiles a product at its first call with a shape: call it once before a capture"
            )
        if M:
            from rlkernel_cuda.common.quantize_tokens import coded

            codes, scale = coded(x.detach().reshape(M, K).contiguous(), _MULTIPLE)
            with torch.cuda.device_of(x):
                found.made.run_gemm(codes[:M], w.parts["codes"], y.view(M, N), scale, w.parts["scale"])
            _built.add(kind)
        return y

    return run


def qmatmul(call: QmatmulCall) -> Tensor:
    """Prepare one call and run it.

    Raises:
        CaptureError: a graph is being captured and this product has not been compiled yet.
        RLKernelError: FlashInfer is not as `fits` wants it.
    """
    return prepare(call)(call)


def self_test(device: str) -> None:
    """One small product. It belongs in a process of its own: where nvcc cannot compile it, DeepGEMM ends the process.

    Raises:
        RLKernelError: FlashInfer is not as `fits` wants it, or the product is wrong.
    """
    spec = QuantSpec.named("fp8_block128", act="block128_fp8")
    x = torch.ones(_MULTIPLE, BLOCK, dtype=torch.bfloat16, device=device)
    y = qmatmul(QmatmulCall(x, quantize(torch.ones(BLOCK, BLOCK, device=device), spec)))
    error = (y.float() - BLOCK).abs().max().item()
    if not error < 1:
        raise RLKernelError(f"FlashInfer's sums of {BLOCK} ones are off by {error:.3g}")
