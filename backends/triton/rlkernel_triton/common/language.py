"""`triton` and `triton.language`, as modules of kernels and of host code take them.

    from rlkernel_triton.common.language import tl, triton

Where Triton is not installed both are `rlkernel_triton.common.fake_triton`: the modules can be imported all the same,
and their kernels launched from a bundle. This import decides once.
"""

from __future__ import annotations

from typing import Any

tl: Any
triton: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:
    from rlkernel_triton.common.fake_triton import tl, triton

__all__ = ["tl", "triton"]
