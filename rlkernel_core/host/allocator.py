"""Settings of torch's allocator that fail on a Jetson, found in the environment before torch reads it.

torch guards against them when it is compiled for Tegra only, and a build for Arm servers runs on Tegra too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

# torch 2.10 renamed the variable and reads both.
VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Fault(NamedTuple):
    """A setting that fails there."""

    setting: str  # as it stands in the environment: "PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True"
    why: str
    fix: str
    fatal: bool  # allocation fails; otherwise it may


# option -> (values that fail; empty for any), why, whether allocation fails for sure.
_OPTIONS: Final = {
    "expandable_segments": (
        ("true", "1"),
        (
            "it maps memory by the driver's virtual memory calls, which Tegra does not serve: the first large "
            "allocation fails as `RuntimeError: CUDA driver error: out of memory`, with memory left (unsloth-zoo #1235)"
        ),
        True,
    ),
    "backend": (
        ("cudamallocasync",),
        "it needs memory pools, which a Tegra driver need not serve; ask cudaDevAttrMemoryPoolsSupported",
        False,
    ),
    "pinned_use_cuda_host_register": (
        ("true", "1"),
        "it registers host memory, which Tegra serves on I/O-coherent chips only; ask cudaDevAttrHostRegisterSupported",
        False,
    ),
}


def faults(environ: Mapping[str, str]) -> list[Fault]:
    """What of an environment's allocator settings fails on a Jetson."""
    found = []
    for variable in VARIABLES:
        parts = [part.strip() for part in environ.get(variable, "").split(",")]
        for part in parts:
            option, _, value = part.partition(":")
            values, why, fatal = _OPTIONS.get(option.strip(), ((), "", False))
            if value.strip().lower() in values:
                rest = ",".join(p for p in parts if p != part)
                fix = f"export {variable}={rest}" if rest else f"unset {variable}"
                found.append(Fault(f"{variable}: {part}", why, fix, fatal))
    return found
