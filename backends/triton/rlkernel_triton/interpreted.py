"""The same kernels under Triton's interpreter, on CPU tensors: what they mean, without a GPU.

Needs `TRITON_INTERPRET=1` in the environment before Triton is imported; a launch without it is a typed error.
Claims only; importing this loads neither torch nor Triton.
"""

from __future__ import annotations

from rlkernel_triton.claims import manifest

backend = manifest("triton-interpreter", device="cpu")
