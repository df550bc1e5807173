"""AMD's AITER as a backend of its own, named `aiter`: it runs where a policy names it and never by itself.

Claims only: importing this loads neither torch nor AITER. Whether AITER is installed is asked of the distributions'
metadata, because importing it starts compilers, writes files, and ends the process where it fails.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS
from rlkernel_rocm.aiter.calls import NEEDED

# architecture -> the fp8 element whose codes its matrix instructions take
ELEMENTS: Final = {"gfx942": "e4m3fnuz", "gfx950": "e4m3fn"}
_FEATURES: Final = (
    *("format:int8_w8a8", "format:fp8_channel", "act:token_fp8"),
    *("format:fp8_block128", "act:block128_fp8"),
)


def _impl(arch: str, element: str) -> Impl:
    spec = OPERATORS["qmatmul"]
    return Impl(
        op=spec.id,
        target="rlkernel_rocm.aiter.qmatmul:qmatmul",
        requires=Requires(device="cuda", dtypes=("bfloat16", "float16"), arch=(arch,), packages=(NEEDED,)),
        supports=frozenset({*_FEATURES, f"element:{element}", "scale_dtype:float32"}) & spec.feature_names,
        check=f"rlkernel_rocm.aiter.qmatmul:fits_{arch}",
    )


backend = Backend(name="aiter", api=API_VERSION, impls=tuple(_impl(*row) for row in ELEMENTS.items()))
