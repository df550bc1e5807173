"""What is claimed on Jetson: kernels from a bundle; what bundles do not have where Triton is installed.

Imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.errors import RLKernelError
from rlkernel_core.manifest import Backend, Impl

# Orin; Thor, which compilers before CUDA 13 call sm101.
ARCHS: Final = ("sm87", "sm110", "sm101")
_COMPILED_HERE: Final = ("triton>=3.4",)  # and a C compiler, which Triton asks for itself


def manifest() -> Backend:
    """The backend `jetson`.

    Raises:
        RLKernelError: rlkernel-triton, whose kernels these are, is not installed.
    """
    try:
        from rlkernel_triton.aot.backend import OPERATORS
        from rlkernel_triton.aot.backend import manifest as bundle_manifest
        from rlkernel_triton.claims import ASKED_FOR
        from rlkernel_triton.claims import manifest as portable_manifest
    except ModuleNotFoundError as error:
        raise RLKernelError(
            "rlkernel-jetson runs the kernels of rlkernel-triton, which is not installed: pip install rlkernel-triton"
        ) from error
    bundled = bundle_manifest("jetson", "rlkernel_jetson.bundled", ARCHS)
    asked_for = {claim.target for claim in ASKED_FOR.values()}
    others = tuple(
        _with_triton(impl) if impl.target in asked_for else impl
        for impl in portable_manifest("jetson", device="cuda", arch=ARCHS).impls
        if impl.op.partition("@")[0] not in OPERATORS or impl.target in asked_for
    )
    return bundled.model_copy(update={"impls": (*bundled.impls, *others)})


def _with_triton(impl: Impl) -> Impl:
    return impl.model_copy(update={"requires": impl.requires.model_copy(update={"packages": _COMPILED_HERE})})
