"""Log-probabilities of ids and entropies of rows of logits, in one pass over them, by rlkernel's Triton kernels.

The functions have the parameters of those of the same names in TRL. Results are fp32, where TRL's have the dtype of the
logits; an id outside of the vocabulary gives NaN and no gradient. torch.compile breaks its graph around them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.spec.logprob import SPEC, LogprobResult
from rlkernel_triton.launchers import COMPILES, on_device_of
from rlkernel_triton.logprob.launch import logprob

__all__ = ["selective_log_softmax", "selective_log_softmax_and_entropy"]
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)  # that the kernels read

if not COMPILES:
    raise ImportError("rlkernel_logprob is made of Triton kernels, and Triton is not installed: pip install triton")


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ids and the entropies of their rows, in one pass over the logits.

    Args:
        logits: [..., V] bf16, fp16 or fp32, on a GPU (on a CPU in Triton's interpreter).
        index: [...] ids.
        entropy_requires_grad: whether the entropy has a gradient.
        temperature: of the law, > 0.
        row_mask: [...]; where it is 0 a row is not read, and its results and gradients are 0.

    Returns:
        fp32 [...] twice, differentiable with respect to logits.

    Raises:
        ArgumentError: other sizes, dtypes or devices, or a temperature <= 0; a ValueError.
        RLKernelError: Triton launches nothing on this device.
    """
    out = _run(logits, index, temperature=temperature, mask=_counted(row_mask), entropy=True)
    assert out.entropy is not None  # it was asked for
    return out.logprob, out.entropy if entropy_requires_grad else out.entropy.detach()


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of ids, one per row or several.

    Args:
        logits: [..., V] bf16, fp16 or fp32, on a GPU (on a CPU in Triton's interpreter).
        index: [...] ids, or [..., K].
        temperature: of the law, > 0.
        row_mask: of the shape of index; where it is 0, results and gradients are 0.

    Returns:
        fp32, of the shape of index, differentiable with respect to logits.

    Raises:
        ArgumentError: other sizes, dtypes or devices, or a temperature <= 0; a ValueError.
        RLKernelError: Triton launches nothing on this device.
    """
    counted = _counted(row_mask)
    if counted is not None and index.dim() == logits.dim():  # an entry of each id: those that do not count are absent
        index, counted = index.where(counted, -1), None
    return _run(logits, index, temperature=temperature, mask=counted).logprob


@torch.compiler.disable
def _run(logits: Tensor, ids: Tensor, **request: Any) -> LogprobResult:
    call = SPEC.call(logits, ids, **request)
    if SPEC.check is not None:
        SPEC.check(call)
    if logits.dtype not in _DTYPES:
        problem = "must be bf16, fp16 or fp32 for the Triton kernels"
        raise ArgumentError("logits", logits.dtype, problem, "Pass logits.float(), say.")
    with on_device_of(logits):
        return logprob(call)


def _counted(row_mask: Tensor | None) -> Tensor | None:
    return None if row_mask is None else row_mask != 0
