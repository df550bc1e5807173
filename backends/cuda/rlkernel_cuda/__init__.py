"""Kernels for NVIDIA GPUs, one chip at a time: the backend named `cuda`.

Claims only; importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from typing import Final

from rlkernel_core.manifest import API_VERSION, Backend, Impl, Requires

# wgmma and TMA: compute capability 9.0 and no other.
HOPPER: Final = Requires(device="cuda", dtypes=("bfloat16",), arch=("sm90",), packages=("triton>=3.6",))

LINEAR_LOGPROB: Final = frozenset(
    {
        "grad",
        "deterministic",
        "capturable",
        "per_row_temperature",
        "bias",
        "softcap",
        "logit_scale",
        "mask",
        "entropy",
        "backward:save",
        "backward:recompute",
        "max_workspace_bytes",
    }
)

backend = Backend(
    name="cuda",
    api=API_VERSION,
    impls=(
        Impl(
            op="linear_logprob@1",
            target="rlkernel_cuda.linear_logprob:linear_logprob",
            requires=HOPPER,
            supports=LINEAR_LOGPROB,
            check="rlkernel_cuda.linear_logprob:fits",
        ),
    ),
)
