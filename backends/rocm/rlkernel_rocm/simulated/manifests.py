"""Manifests of the simulated backends: every claim of the Triton kernels that need not ask for it, on CPU tensors.

Claims only; importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from rlkernel_core.manifest import Backend
from rlkernel_triton.claims import manifest as claims

_NEEDED = ("triton>=3.6", "numpy")


def manifest(arch: str) -> Backend:
    """The backend `simulated-<arch>`, whose implementations stand in `rlkernel_rocm.simulated.<arch>`."""
    portable = claims(f"simulated-{arch}", device="cpu", asked_for=False)
    impls = tuple(
        impl.model_copy(
            update={
                "target": f"rlkernel_rocm.simulated.{arch}:{impl.op.partition('@')[0]}",
                "prepared": True,
                "gradient": None,
                "requires": impl.requires.model_copy(update={"packages": _NEEDED}),
            }
        )
        for impl in portable.impls
    )
    return portable.model_copy(update={"impls": impls})
