"""The code for Orin on another NVIDIA GPU: the backend `orin-ptx`, which runs sm_87 PTX through the driver's compiler.

Evidence of what the kernels compute, for those who have no board. It says nothing of speed on one, and nothing of the
machine code that a board loads. Claims only; importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rlkernel_triton.aot.backend import BundleBackend, folder, manifest

backend = manifest("orin-ptx", "rlkernel_jetson.elsewhere", arch=("sm89+",))
_backend: Final = BundleBackend(lambda: [folder()], force=("sm_87", "ptx"))


def __getattr__(name: str) -> Callable[..., Any]:
    return _backend(name)
