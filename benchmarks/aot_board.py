"""The sm_87 code on an H200 that is made as small as a board: the backend `orin-small`, with what it is confined to.

    rlkernel conformance run orin-small --manifest aot_board:backend --device cuda

From its first call of an operator on, everything on torch's current stream of a thread, and the backward passes of it,
has AOT_MULTIPROCESSORS of them (a green context of the driver); torch's allocator has AOT_GIB. All threads have one
stream, as they have the default stream elsewhere: ranks that are threads hand tensors to one another. Needs
cuda-bindings. A build that the bundles lack is compiled, where AOT_MISSING says into which file it is written down.
Nothing here is measured on a Jetson.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from threading import Lock, local
from typing import Any

from aot_growing import Growing

from rlkernel_triton.aot.backend import claims, folder

_DEFAULT_STREAM = 1  # CU_GREEN_CTX_DEFAULT_STREAM
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
backend = claims("orin-small", "aot_board", arch=("sm89+",))
_found = Growing(lambda: [folder()], force=("sm_87", "ptx"))
_entered, _lock = local(), Lock()


def confined() -> dict[str, Any]:
    """Confine this thread; what it has now."""
    import torch

    with _lock:
        found, stream, _ = _part()
    if not hasattr(_entered, "stream"):
        torch.cuda.synchronize()  # what the thread has begun elsewhere
        torch.cuda.set_stream(stream)
        _entered.stream = stream
    return found


@cache
def _part() -> tuple[dict[str, Any], Any, Any]:
    """A part of the GPU for this process: what it is, its stream, and its context, which lives as long."""
    import torch
    from cuda.bindings import driver

    def said(result: tuple[Any, ...]) -> Any:
        if int(result[0]):
            raise RuntimeError(f"the driver says {result[0]}")
        return result[1] if len(result) == 2 else result[1:]

    multiprocessors = int(os.environ.get("AOT_MULTIPROCESSORS", "8"))
    gib = float(os.environ.get("AOT_GIB", "5"))
    torch.zeros(1, device="cuda")  # the primary context
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / whole, 0)
    device = said(driver.cuDeviceGet(torch.cuda.current_device()))
    all_of = said(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, count, _ = said(driver.cuDevSmResourceSplitByCount(1, all_of, 0, multiprocessors))
    part = said(driver.cuDevResourceGenerateDesc([groups[0]], count))
    green = said(driver.cuGreenCtxCreate(part, device, _DEFAULT_STREAM))
    stream = said(driver.cuGreenCtxStreamCreate(green, _NON_BLOCKING, 0))
    found = {"multiprocessors": groups[0].sm.smCount, "of": all_of.sm.smCount, "GiB": gib}
    return found, torch.cuda.ExternalStream(int(stream)), green


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    found = _found(name)

    @wraps(found)
    def small(call: Any) -> Callable[[Any], Any]:
        confined()
        run = found(call)

        def within(call: Any) -> Any:
            confined()
            return run(call)

        return within

    return found if name == "self_test" or name.endswith("_fits") else small
