"""Portable Triton kernels: the backend named `triton`. Claims only; importing this loads neither torch nor Triton."""

from __future__ import annotations

from typing import Final

from rlkernel_triton.claims import manifest

# Architectures the kernels are compiled for (tools/compile_gate.py). A later one of the same family is taken to work.
ARCHS: Final = ("sm80+", "gfx90a", "gfx942", "gfx950", "gfx11*", "gfx12*")
# gfx1250 has other matrix instructions and no machine to try them on.
EXCLUDED: Final = ("gfx125*",)

backend = manifest("triton", device="cuda", arch=ARCHS, arch_excluded=EXCLUDED)  # torch calls HIP "cuda" too
