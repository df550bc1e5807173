"""hipBLASLt, through torch, as a backend of its own: fp8 products with a scale a row and a scale a token.

`torch._scaled_mm` calls it on AMD GPUs. Named `hipblaslt`, it runs where a policy names it and never by itself, since
it has not run on the hardware. Claims only: importing this loads no torch.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

# flavour -> (architectures whose matrix instructions take it, element of weights); hipBLASLt's table of types
FLAVOURS: Final = {"fnuz": (("gfx942",), "e4m3fnuz"), "ocp": (("gfx950", "gfx1200", "gfx1201"), "e4m3fn")}


def _impl(flavour: str, archs: tuple[str, ...], element: str) -> Impl:
    spec = OPERATORS["qmatmul"]
    claimed = {"format:fp8_channel", "act:token_fp8", f"element:{element}", "scale_dtype:float32"}
    return Impl(
        op=spec.id,
        target="rlkernel_rocm.hipblaslt.qmatmul:qmatmul",
        requires=Requires(device="cuda", dtypes=("bfloat16",), arch=archs, packages=("torch>=2.9",)),
        supports=frozenset(claimed) & spec.feature_names,
        check=f"rlkernel_rocm.hipblaslt.qmatmul:fits_{flavour}",
    )


backend = Backend(name="hipblaslt", api=API_VERSION, impls=tuple(_impl(f, *row) for f, row in FLAVOURS.items()))
