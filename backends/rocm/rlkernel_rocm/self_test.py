"""Does it really run here? One small kernel on one device, after a look at what the device claims to be."""

from __future__ import annotations

import os
from typing import Any

import torch

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.logprob import LogprobCall
from rlkernel_rocm.architectures import ARCHITECTURES, base
from rlkernel_rocm.detect import detect
from rlkernel_torch.logprob import logprob as definition


def self_test(device: str) -> None:
    """Compute log-probabilities on a device and hold them against their definition.

    Raises:
        RLKernelError: what is wrong with the installation or the device, or that the kernel's result is wrong.
    """
    inspect(device, torch.version.hip, torch.cuda)
    from rlkernel_triton.logprob.launch import logprob

    g = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(4, 1000, generator=g) * 3, torch.randint(0, 1000, (4,), generator=g)
    got = logprob(LogprobCall(logits.to(device, torch.bfloat16), ids.to(device))).logprob.cpu()
    want = definition(LogprobCall(logits.bfloat16().double(), ids)).logprob
    error = (got.double() - want).abs().max().item()
    if not error < 1e-4:
        raise RLKernelError(f"log-probabilities on {device} are off by {error:.3g}; expected below 1e-4")


def inspect(device: str, hip: str | None, accelerator: Any) -> str:
    """The architecture of a device.

    Args:
        device: torch device string.
        hip: version of HIP that torch is built for.
        accelerator: `torch.cuda`.

    Raises:
        RLKernelError: torch is not built for ROCm, sees no device, or this one is of an unknown or a false kind.
    """
    if hip is None:
        raise RLKernelError("this torch is not built for ROCm (torch.version.hip is None); see docs/rocm.md")
    if not accelerator.is_available():
        said = "; ".join(f"{p.text} ({p.fix})" for p in detect(environ=os.environ).problems)
        raise RLKernelError(f"torch {hip} sees no AMD GPU. {said or 'rlkernel doctor says what is there'}")
    index = int(device.partition(":")[2] or 0)
    arch = base(str(accelerator.get_device_properties(index).gcnArchName))
    if arch not in ARCHITECTURES:
        raise RLKernelError(f"{device} is {arch}, for which no kernel was compiled; known: {', '.join(ARCHITECTURES)}")
    false = [p for p in detect(environ=os.environ).problems if p.code == "override"]
    if false:
        raise RLKernelError(f"{false[0].text}: kernels for another architecture may hang it. {false[0].fix}")
    return arch
