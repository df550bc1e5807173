"""Before a launch: the device that the tensors are on, and whether Triton can run there.

Legend as in the kernels' modules. Imports torch and Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from rlkernel_core.errors import RLKernelError
from rlkernel_core.spec.form import OpCall
from rlkernel_triton.common.language import triton

C = TypeVar("C", bound=OpCall[Any])
T = TypeVar("T")
# Decided when Triton's decorators run, that is once, when a kernel's module is imported.
INTERPRETED: Final[bool] = triton.knobs.runtime.interpret


def blank(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a tensor that a kernel does not read: nothing, at address 0, of which no driver is asked."""
    return torch.empty(0, dtype=dtype, device=device)


def untracked(run: Callable[[C], T], call: C) -> Callable[[C], T]:
    """`run`, without autograd where a tensor of `call` wants a gradient; calls of one shape agree in that."""
    wanted = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in call.as_dict().values())
    return torch.no_grad()(run) if wanted else run


def lasting(make: Callable[[], T], device: torch.device) -> T:
    """What `make` allocates, to be kept from call to call; the current stream waits for what fills it.

    While torch.compile's graphs warm up, what their thread allocates (their stream, in earlier versions) lies in a pool
    that they rewind later. So another thread allocates here, on another stream.
    """
    if device.type != "cuda":
        return make()
    here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def elsewhere() -> T:
        with torch.cuda.stream(aside):
            return make()

    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(elsewhere).result()
    here.wait_stream(aside)
    return made


def require_triton_on(kind: str) -> None:
    """See to it that Triton runs kernels on devices of a type that is no GPU's: "cpu" under a simulator, say.

    Raises:
        RLKernelError: Triton's interpreter is off, and no driver of Triton's serves the type.
    """
    if INTERPRETED:
        return
    try:
        served = triton.runtime.driver.active.get_active_torch_device().type
    except RuntimeError:  # what Triton raises where it finds no GPU
        served = None
    if served != kind:
        raise RLKernelError(
            f"Triton cannot launch kernels on {kind}. Set TRITON_INTERPRET=1 before Triton is imported to run them in "
            "its interpreter, or move the tensors to a GPU."
        )
