"""AMD GPUs: the backend named `rocm`. Claims only; importing this loads neither torch nor Triton and asks no device."""

from __future__ import annotations

from rlkernel_rocm.claims import manifest

backend = manifest()
