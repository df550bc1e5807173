"""What is claimed on AMD GPUs: the kernels of rlkernel-triton, by family of architectures.

Imports neither torch nor Triton.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.errors import RLKernelError
from rlkernel_core.manifest import Backend

# Families of architectures; what is left out there; features and operators that are known to break: graphs with
# kernels of Triton's have faulted on gfx11 and gfx12 (vLLM #34154, #35485). No kernel was compiled for gfx1250.
FAMILIES: Final = (
    (("gfx90a", "gfx942", "gfx950"), (), frozenset[str](), frozenset[str]()),
    (("gfx11*", "gfx12*"), ("gfx125*",), frozenset({"capturable"}), frozenset({"capture"})),
)
SELF_TEST: Final = "rlkernel_rocm.self_test:self_test"


def manifest() -> Backend:
    """The backend `rocm`: one implementation an operator and family.

    Raises:
        RLKernelError: rlkernel-triton, whose kernels these are, is not installed.
    """
    try:
        from rlkernel_triton.claims import manifest as portable
    except ModuleNotFoundError as error:
        raise RLKernelError(
            "rlkernel-rocm runs the kernels of rlkernel-triton, which is not installed: pip install rlkernel-triton"
        ) from error
    impls = [
        impl.model_copy(update={"supports": impl.supports - broken})
        for archs, excluded, broken, missing in FAMILIES
        for impl in portable("rocm", device="cuda", arch=archs, arch_excluded=excluded).impls  # torch calls HIP "cuda"
        if impl.op.partition("@")[0] not in missing
    ]
    whole = portable("rocm", device="cuda")
    return whole.model_copy(update={"impls": tuple(impls), "self_test": SELF_TEST})
