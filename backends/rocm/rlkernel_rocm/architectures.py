"""What is known about each AMD architecture: one row, one source beside each number. Data alone; imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Architecture(NamedTuple):
    """One GPU architecture as kernels see it."""

    parts: str  # what is sold with it
    wave: int  # lanes of a wave
    lds: int  # bytes that one workgroup may use
    units: int  # compute units of the largest part
    fp8: str  # the flavour its matrix instructions take: "fnuz", "ocp", or "" where they take none
    scaled: bool  # matrix instructions with block scales (MXFP8, MXFP6, MXFP4)
    matrix: str  # "mfma" or "wmma"
    aiter: bool  # AITER's compiled kernels support it
    graphs: bool  # graph capture is not known to fail


_KIB: Final = 1024
# Waves, LDS and units: AMD's hardware specification pages. fp8: ISA documents, hipBLASLt's table of types.
# AITER: its README. Graphs: reports of page faults on gfx11 and gfx12 (vLLM #34154, #35485). None was measured here.
ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "gfx90a": Architecture("MI210, MI250, MI250X", 64, 64 * _KIB, 110, "", False, "mfma", False, True),
    "gfx942": Architecture("MI300X, MI300A, MI325X, MI308X", 64, 64 * _KIB, 304, "fnuz", False, "mfma", True, True),
    "gfx950": Architecture("MI350X, MI355X", 64, 160 * _KIB, 256, "ocp", True, "mfma", True, True),
    "gfx1100": Architecture("RX 7900, W7900", 32, 64 * _KIB, 96, "", False, "wmma", False, False),
    "gfx1101": Architecture("RX 7800, RX 7700", 32, 64 * _KIB, 60, "", False, "wmma", False, False),
    "gfx1102": Architecture("RX 7600", 32, 64 * _KIB, 32, "", False, "wmma", False, False),
    "gfx1150": Architecture("Radeon 890M", 32, 64 * _KIB, 16, "", False, "wmma", False, False),
    "gfx1151": Architecture("Radeon 8060S", 32, 64 * _KIB, 40, "", False, "wmma", False, False),
    "gfx1200": Architecture("RX 9060", 32, 64 * _KIB, 32, "ocp", False, "wmma", False, False),
    "gfx1201": Architecture("RX 9070, R9700", 32, 64 * _KIB, 64, "ocp", False, "wmma", False, False),
}


def base(name: str) -> str:
    """`gfx942:sramecc+:xnack-`, as torch reports it, without its suffixes."""
    return name.partition(":")[0]


def spelled(version: int) -> str:
    """`gfx_target_version` of the kernel driver in LLVM's spelling: 90402 is gfx942, 90010 is gfx90a."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
