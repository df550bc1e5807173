"""cuBLASLt as a backend of its own: it runs where a policy names it, never by itself.

Fp8 products of weights with tokens that the format quantizes too, through torch; and `linear`, without a workspace and
so without split sums. Claims only: importing this loads no torch.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

FEATURES: Final = frozenset(
    {"deterministic", "capturable", "format:fp8_channel", "act:token_fp8", "format:fp8_block128", "act:block128_fp8"}
)
backend = Backend(
    name="cublaslt",
    api=API_VERSION,
    impls=(
        Impl(
            op=OPERATORS["qmatmul"].id,
            target="rlkernel_cuda.cublaslt.qmatmul:prepare",
            requires=Requires(device="cuda", dtypes=("bfloat16",), arch=("sm90",), packages=("torch>=2.10",)),
            supports=FEATURES,
            prepared=True,
            check="rlkernel_cuda.cublaslt.qmatmul:fits",
        ),
        Impl(
            op=OPERATORS["linear"].id,
            target="rlkernel_cuda.cublaslt.linear:prepare",
            requires=Requires(device="cuda", dtypes=("bfloat16", "float16"), arch=("sm90",), packages=("torch>=2.10",)),
            supports=OPERATORS["linear"].feature_names - {"group"},
            prepared=True,
            gradient="rlkernel_cuda.cublaslt.linear:CublasltPair",
            sums="cublaslt/unsplit/f32",
        ),
    ),
)
