"""`triton` and `triton.language`, as modules of kernels and of host code take them.

    from rlkernel_triton.language import tl, triton

Where Triton is not installed, names stand for both (`rlkernel_triton.aot.standin`), so that the modules can be imported
all the same and their kernels launched from a bundle. Which it is, is decided once, by this import.
"""

from __future__ import annotations

from typing import Any

tl: Any
triton: Any
try:
    import triton
    import triton.language as tl
except ImportError:
    from rlkernel_triton.aot.standin import tl, triton

__all__ = ["tl", "triton"]
