"""The torch that is installed, as a child process reports it: a build that crashes at import takes only the child."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlkernel.discover import JETSON_ARCHS
from rlkernel.doctor.hardware import Gpu

_TIMEOUT_S: Final = 120.0  # a cold file system
_CHILD: Final = """
import json, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import torch
    seen = torch.cuda.is_available()
    devices = []
    for i in range(torch.cuda.device_count() if seen else 0):
        p = torch.cuda.get_device_properties(i)
        arch = p.gcnArchName.partition(":")[0] if torch.version.hip else f"sm{p.major}{p.minor}"
        devices.append([p.name, arch])
found = {
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "seen": seen,
    "archs": torch.cuda.get_arch_list() if seen else torch._C._cuda_getArchFlags().split()
        if hasattr(torch._C, "_cuda_getArchFlags") and (torch.version.cuda or torch.version.hip) else [],
    "devices": devices, "warnings": [str(w.message).splitlines()[0] for w in said],
}
print("\\n" + json.dumps(found))
"""


@dataclass(frozen=True)
class TorchBuild:
    """One installed torch."""

    version: str = ""
    cuda: str | None = None  # CUDA it was built for: "12.8"
    hip: str | None = None  # ROCm it was built for
    archs: tuple[str, ...] = ()  # architectures in the build: "sm_90", "compute_90", "gfx942"
    seen: bool = False  # torch.cuda.is_available()
    devices: tuple[Gpu, ...] = ()  # those torch sees
    warnings: tuple[str, ...] = ()  # what it said while looking for devices
    error: str = ""  # why it cannot be imported

    @property
    def kind(self) -> str:
        """`CPU`, `CUDA 12.8` or `ROCm 7.0`."""
        return f"CUDA {self.cuda}" if self.cuda else f"ROCm {self.hip}" if self.hip else "CPU"

    def covers(self, arch: str) -> bool | None:
        """Whether the build has code for an architecture; None where it does not say."""
        return _covered(arch, self.archs) if self.archs else None


def ask() -> TorchBuild:
    """Ask a child process about the installed torch."""
    try:
        done = subprocess.run(  # noqa: S603 our own interpreter and source
            [sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return TorchBuild(error=f"importing it took more than {_TIMEOUT_S:g} s")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"the process ended with status {done.returncode}"]
        return TorchBuild(error=last[0])
    return build(json.loads(done.stdout.strip().splitlines()[-1]))


def build(found: Mapping[str, Any]) -> TorchBuild:
    """A TorchBuild from the child's answer."""
    devices = tuple(Gpu(name, arch) for name, arch in found["devices"])
    said = tuple(found["warnings"])
    return TorchBuild(
        found["version"], found["cuda"], found["hip"], tuple(found["archs"]), found["seen"], devices, said
    )


def _covered(arch: str, archs: tuple[str, ...]) -> bool:
    """Whether code for one of `archs` runs on `arch`.

    CUDA C++ programming guide, "Binary compatibility" and "PTX compatibility": binary code runs on its own major
    version from its minor on, not across the desktop and the Tegra chips of Jetson; PTX (`compute_`) is compiled for
    anything not older; code for sm_90a runs on exactly that, code for sm_100f on its family.
    """
    if not arch.startswith("sm"):
        return arch in {a.partition(":")[0] for a in archs}
    have = int(arch.removeprefix("sm"))
    for built in archs:
        kind, _, number = built.partition("_")
        digits = number.rstrip("af")
        if not digits.isdigit():
            continue
        base = int(digits)
        tegra = f"sm{base}" in JETSON_ARCHS or arch in JETSON_ARCHS
        later_minor = kind == "sm" and base // 10 == have // 10 and not tegra
        if base == have or (base < have and not number.endswith("a") and (kind == "compute" or later_minor)):
            return True
    return False
