"""FlashInfer's fp8 product as a backend of its own: it runs where a policy names it, never by itself.

Installing FlashInfer would else change the bits of a call (docs/decisions/0003). Claims only: importing this loads
neither torch nor FlashInfer.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

# Its runner is no documented name: a later minor version may give it other arguments.
NEEDED: Final = "flashinfer-python>=0.7.2,<0.8"

backend = Backend(
    name="flashinfer",
    api=API_VERSION,
    impls=(
        Impl(
            op=OPERATORS["qmatmul"].id,
            target="rlkernel_cuda.flashinfer.qmatmul:prepare",
            requires=Requires(device="cuda", dtypes=("bfloat16",), arch=("sm90",), packages=(NEEDED,)),
            supports=frozenset({"deterministic", "capturable", "format:fp8_block128", "act:block128_fp8"}),
            prepared=True,
            check="rlkernel_cuda.flashinfer.qmatmul:fits",
        ),
    ),
    self_test="rlkernel_cuda.flashinfer.qmatmul:self_test",
)
