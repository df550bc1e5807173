"""What a number may depend on: versions, device, driver, clocks, why the card was throttled, the commit."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

from rlkernel import policy
from rlkernel.discover import GROUP, PackageVersions, entries, guarded
from rlkernel.probe import device_facts
from rlkernel_core import __version__
from rlkernel_core.host.board import board
from rlkernel_core.host.facts import facts
from rlkernel_core.host.memory import memory
from rlkernel_core.host.power import power

_ROOT: Final = Path("/")
# What nvidia-smi is asked, and what the answer is called.
_GPU_STATE: Final = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "clocks_throttle_reasons.active": "throttle_reasons",
    "power.draw": "watts",
    "power.limit": "watts_limit",
    "temperature.gpu": "celsius",
}
# Bits of throttle_reasons that matter here (nvml.h, nvmlClocksEventReason*).
THROTTLE: Final = {0x1: "idle", 0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "thermal"}


def environment(device: str, root: Path = _ROOT) -> dict[str, Any]:
    """Everything but the state of the card, which changes while it is measured; `root`: of the file system."""
    import torch

    versions = PackageVersions()
    packages = {name: version for name in _packages() if (version := versions.get(name)) is not None}
    return {
        "rlkernel": __version__,
        "commit": commit(),
        "source": source(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": [round(x, 1) for x in os.getloadavg()],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{name: versions.get(name) for name in ("triton", "numpy")},
        "packages": packages,
        **{f"device_{k}": v for k, v in device_facts(device).items() if k != "torch"},
        **({"board": told, "memory": room.as_dict()} if (told := facts(root)) and (room := memory(root)) else {}),
    }


def _packages() -> list[str]:
    """Libraries that the implementations of installed backends need."""
    manifests = [policy.installed()[name].manifest for name in policy.installed()]
    impls = [impl for manifest in manifests if manifest is not None for impl in manifest.impls]
    return sorted({Requirement(text).name for impl in impls for text in impl.requires.packages})


def commit() -> str | None:
    """Commit of the clone this runs from, with `+` where files differ from it; None outside a clone."""
    git, here = shutil.which("git"), Path(__file__).parent
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        done = subprocess.run([git, "-C", str(here), *words], capture_output=True, text=True, check=False)  # noqa: S603
        return done.stdout.strip() if done.returncode == 0 else None

    head = ask("rev-parse", "HEAD")
    return head and head + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")


def source() -> str:
    """12 hex digits over our own Python files, backends included: what ran, where there is no clone to ask."""
    packages = ["rlkernel_core", "rlkernel", "rlkernel_common", "rlkernel_torch", "rlkernel_bench"]
    packages += sorted({e.value.partition(":")[0].partition(".")[0] for e in entries(GROUP)[0]} - set(packages))
    digest = sha256()
    for package in packages:
        spec, _ = guarded(lambda name=package: find_spec(name))
        for folder in spec.submodule_search_locations or () if spec else ():
            for file in sorted(Path(folder).rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def gpu_state(device: str, root: Path = _ROOT) -> dict[str, Any] | None:
    """Clocks, power, temperature and throttle reasons now; None where nobody can say.

    A Jetson's own sensors are read, whose nvidia-smi is absent or leaves these fields empty; its over-current events
    are counted since it was started, so a count that grew between two workloads is a throttled clock.
    """
    if board(root) is not None:
        said = power(root)
        return {
            "sm_mhz": said.gpu.mhz if said.gpu else None,
            "celsius": max(said.celsius.values(), default=None),
            "throttled_by": None,  # nobody tells reasons
            **{k: v for k, v in said.as_dict().items() if k in {"watts", "watts_of", "rails", "over_current"}},
            "zones": said.celsius,
        }
    smi = shutil.which("nvidia-smi")
    kind, _, index = device.partition(":")
    if smi is None or kind != "cuda":
        return None
    asked = [smi, f"--id={index or 0}", f"--query-gpu={','.join(_GPU_STATE)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20)  # noqa: S603
    except (subprocess.SubprocessError, OSError):
        return None
    state = dict(zip(_GPU_STATE.values(), (word.strip() for word in done.stdout.split(",")), strict=False))
    return {**state, "throttled_by": reasons(state.get("throttle_reasons", ""))}


def reasons(bits: str) -> list[str]:
    """Names of the bits of nvidia-smi's `0x0000000000000004`."""
    try:
        value = int(bits, 16)
    except ValueError:
        return []
    return [name for bit, name in THROTTLE.items() if value & bit]
