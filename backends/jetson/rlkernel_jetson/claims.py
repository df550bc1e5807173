"""What is claimed on Jetson: the kernels of rlkernel-triton on the GPUs of Orin and Thor.

Imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.errors import RLKernelError
from rlkernel_core.manifest import Backend

# Orin; Thor, which compilers before CUDA 13 call sm101.
ARCHS: Final = ("sm87", "sm110", "sm101")


def manifest() -> Backend:
    """The backend `jetson`.

    Raises:
        RLKernelError: rlkernel-triton, whose kernels these are, is not installed.
    """
    try:
        from rlkernel_triton.claims import manifest as portable
    except ModuleNotFoundError as error:
        raise RLKernelError(
            "rlkernel-jetson runs the kernels of rlkernel-triton, which is not installed: pip install --no-deps "
            "rlkernel-triton (without --no-deps pip would replace the torch of JetPack)"
        ) from error
    return portable("jetson", device="cuda", arch=ARCHS)
