"""Jetson Orin and Thor: the backend named `jetson`. Claims only; importing this loads neither torch nor Triton."""

from __future__ import annotations

from rlkernel_jetson.claims import manifest

backend = manifest()
