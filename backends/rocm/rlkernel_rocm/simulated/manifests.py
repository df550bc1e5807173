"""Manifests of the simulated backends: every claim of the Triton kernels, on CPU tensors.

Claims only; importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from typing import Any

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_triton.claims import CLAIMS


def manifest(arch: str) -> Backend:
    """The backend `simulated-<arch>`, whose implementations stand in `rlkernel_rocm.simulated.<arch>`."""

    def impl(op: str) -> Impl:
        spec: Any = OPERATORS[op]
        claim = CLAIMS[op]
        return Impl(
            op=spec.id,
            target=f"rlkernel_rocm.simulated.{arch}:{op}",
            requires=Requires(device="cpu", dtypes=claim.dtypes, packages=("triton>=3.6", "numpy")),
            supports=spec.feature_names - claim.without,
            check=claim.check,
        )

    return Backend(name=f"simulated-{arch}", api=API_VERSION, impls=tuple(impl(op) for op in CLAIMS))
