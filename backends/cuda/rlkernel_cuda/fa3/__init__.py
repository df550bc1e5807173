"""FlashAttention 3 as a backend of its own: `attention`, where a policy names it, never by itself.

Installing a library must not change the bits of a call (docs/decisions/0003). Claims only: importing this loads neither
torch nor FlashAttention.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires
from rlkernel_core.spec import OPERATORS

# Its tiles decide bits and which pages it reads, and no later version promises these.
NEEDED: Final = "fa3-fwd==0.0.3"

backend = Backend(
    name="fa3",
    api=API_VERSION,
    impls=(
        Impl(
            op=OPERATORS["attention"].id,
            target="rlkernel_cuda.fa3.attention:prepare",
            requires=Requires(device="cuda", dtypes=("bfloat16",), arch=("sm90",), packages=(NEEDED, "torch>=2.10")),
            supports=frozenset({"deterministic", "batch_invariant", "capturable", "paged", "bidirectional"}),
            prepared=True,
            check="rlkernel_cuda.fa3.attention:fits",
            sums="fa3/unsplit/f32",
        ),
    ),
    self_test="rlkernel_cuda.fa3.attention:self_test",
)
