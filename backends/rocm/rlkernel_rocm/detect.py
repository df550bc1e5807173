"""Which AMD GPUs a process will see, from files and variables alone: nothing here initializes HIP or imports torch.

The kernel driver lists every GPU in /sys/class/kfd; ROCR_VISIBLE_DEVICES, then HIP_VISIBLE_DEVICES (or, where that is
not set, CUDA_VISIBLE_DEVICES) choose among them; HSA_OVERRIDE_GFX_VERSION makes all of them claim another architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from rlkernel_rocm.architectures import ARCHITECTURES, spelled

_NODES: Final = "sys/class/kfd/kfd/topology/nodes"
OVERRIDE: Final = "HSA_OVERRIDE_GFX_VERSION"


class Gpu(NamedTuple):
    """One GPU as the kernel driver lists it."""

    arch: str
    uuid: str  # as ROCR_VISIBLE_DEVICES spells it: "GPU-…"


class Problem(NamedTuple):
    """What keeps kernels from running, or makes a device seem what it is not."""

    code: str  # stable: "mixed-devices"
    text: str
    fix: str


@dataclass(frozen=True)
class Detected:
    """What a process will find."""

    present: tuple[Gpu, ...]  # in the machine
    visible: tuple[Gpu, ...]  # to this process, in its order
    claimed: str | None = None  # architecture that all claim to have
    problems: tuple[Problem, ...] = ()

    @property
    def archs(self) -> tuple[str, ...]:
        """Architectures that kernels will be compiled for, without repetition."""
        return tuple(dict.fromkeys(self.claimed or g.arch for g in self.visible))


def detect(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> Detected:
    """Look at a machine.

    Args:
        root: where its file system starts.
        environ: its environment; empty unless given.
    """
    environ = environ or {}
    present = listed(root)
    visible = _chosen(present, environ.get("ROCR_VISIBLE_DEVICES"))
    second = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    visible = _chosen(visible, second)
    claimed = override(environ.get(OVERRIDE))
    found = Detected(present, visible, claimed)
    return Detected(present, visible, claimed, tuple(_problems(found, environ)))


def listed(root: Path) -> tuple[Gpu, ...]:
    """GPUs of the driver's topology, in its order; nodes without a GPU version are CPUs."""
    found = []
    folders = (f for f in (root / _NODES).glob("*") if f.name.isdigit())
    for folder in sorted(folders, key=lambda f: int(f.name)):
        try:
            lines = (folder / "properties").read_text(encoding="utf-8").splitlines()
        except OSError:  # a partition of another user
            continue
        properties = dict(line.split(maxsplit=1) for line in lines if " " in line)
        version = int(properties.get("gfx_target_version", "0"))
        if version:
            found.append(Gpu(spelled(version), f"GPU-{int(properties.get('unique_id', '0')):016x}"))
    return tuple(found)


def override(value: str | None) -> str | None:
    """The architecture that HSA_OVERRIDE_GFX_VERSION names: "9.4.2" is gfx942."""
    parts = (value or "").split(".")
    if len(parts) != 3 or not all(p.isdigit() for p in parts):
        return None
    major, minor, step = map(int, parts)
    return spelled(10000 * major + 100 * minor + step)


def _chosen(gpus: tuple[Gpu, ...], names: str | None) -> tuple[Gpu, ...]:
    """Those a variable names, by position or UUID, in its order; the first name that fits none ends the list."""
    if names is None:
        return gpus
    out: list[Gpu] = []
    for name in (n.strip() for n in names.split(",")):
        by_name = next((g for g in gpus if g.uuid.lower() == name.lower()), None)
        found = gpus[int(name)] if name.isdigit() and int(name) < len(gpus) else by_name
        if found is None or found in out:
            break
        out.append(found)
    return tuple(out)


def _problems(found: Detected, environ: Mapping[str, str]) -> list[Problem]:
    out = []
    if not found.present:
        text = "the kernel driver lists no AMD GPU (/sys/class/kfd)"
        return [Problem("no-device", text, "install amdgpu-dkms; in a container, start it with --device=/dev/kfd")]
    hip, cuda = environ.get("HIP_VISIBLE_DEVICES"), environ.get("CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        text = f"HIP_VISIBLE_DEVICES={hip} and CUDA_VISIBLE_DEVICES={cuda} disagree; HIP takes the first"
        out.append(Problem("visible-devices", text, "unset CUDA_VISIBLE_DEVICES"))
    if not found.visible:
        out.append(
            Problem("hidden", f"{len(found.present)} GPU(s) are hidden by variables", "unset the *_VISIBLE_DEVICES")
        )
    real = tuple(dict.fromkeys(g.arch for g in found.visible))
    if environ.get(OVERRIDE) and found.claimed is None:
        text = f"{OVERRIDE}={environ[OVERRIDE]} is not of the form 9.4.2"
        out.append(Problem("override", text, f"unset {OVERRIDE}"))
    elif found.claimed is not None and real != (found.claimed,):
        text = f"{OVERRIDE} makes {', '.join(real) or 'hidden devices'} claim to be {found.claimed}"
        out.append(Problem("override", text, f"unset {OVERRIDE}"))
    if len(found.archs) > 1:
        text = f"GPUs of several architectures are visible: {', '.join(found.archs)}"
        out.append(Problem("mixed-devices", text, "HIP_VISIBLE_DEVICES with the positions of one kind"))
    unknown = [a for a in found.archs if a not in ARCHITECTURES]
    if unknown:
        text = f"no kernel was compiled for {', '.join(unknown)}; known are {', '.join(ARCHITECTURES)}"
        out.append(Problem("unknown-architecture", text, "rlkernel runs the reference, in plain torch, on it"))
    return out
