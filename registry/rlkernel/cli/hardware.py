"""Names of devices and architectures, and what people call the chips: for what is typed on a command line.

Sources: NVIDIA, "CUDA GPU Compute Capability"; AMD, "ROCm: accelerator and GPU hardware specifications".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from rlkernel import policy
from rlkernel_core.errors import ArgumentError, UnknownNameError

# Device types of torch (torch.device); a backend may claim others.
DEVICES: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "privateuseone", "xla", "xpu")
ARCHS: Final = (
    *("sm70", "sm72", "sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121"),
    *("gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150"),
    *("gfx1151", "gfx1200", "gfx1201", "gfx1250", "x86_64", "aarch64", "arm64", "AMD64"),
)
# What a chip is called -> its architecture; all of them are of torch's device type cuda.
CHIPS: Final = {
    "v100": "sm70", "t4": "sm75", "a100": "sm80", "a800": "sm80", "a10": "sm86", "a40": "sm86", "rtx3090": "sm86",
    "orin": "sm87", "jetson": "sm87", "l4": "sm89", "l40": "sm89", "l40s": "sm89", "rtx4090": "sm89",
    "h100": "sm90", "h200": "sm90", "h800": "sm90", "h20": "sm90", "gh200": "sm90", "b200": "sm100", "gb200": "sm100",
    "b300": "sm103", "gb300": "sm103", "thor": "sm110", "rtx5090": "sm120", "rtxpro6000": "sm120", "gb10": "sm121",
    "mi100": "gfx908", "mi210": "gfx90a", "mi250": "gfx90a", "mi250x": "gfx90a", "mi300": "gfx942", "mi300a": "gfx942",
    "mi300x": "gfx942", "mi325x": "gfx942", "mi350x": "gfx950", "mi355x": "gfx950", "rx7900xtx": "gfx1100",
    "rx9070": "gfx1201", "rx9070xt": "gfx1201",
}  # fmt: skip


def device_type(text: str) -> str:
    """The device type that a word names; an index after it ("cuda:0") says nothing about the type.

    Raises:
        ArgumentError: it is a chip; the message has the words for it.
        UnknownNameError: neither torch nor an installed backend has such a type; the message has the nearest.
    """
    kind = re.sub(r":\d+$", "", text)
    chip = CHIPS.get(_plain(kind))
    if chip is not None:
        raise ArgumentError("device", repr(text), "is a chip, no device type", f"Say --device cuda --arch {chip}.")
    known = {*DEVICES, *_claimed("device")}
    if kind not in known:
        raise UnknownNameError("device type", text, known)
    return kind


def architecture(text: str) -> str:
    """The architecture that a word names, as torch's facts spell it: "sm90" of sm90, sm_90, sm90a and h100.

    Raises:
        UnknownNameError: there is no such one; the message has the nearest.
    """
    plain = _plain(text)
    if plain in CHIPS:
        return CHIPS[plain]
    by_plain = {_plain(known): known for known in (*ARCHS, *_claimed("arch"))}
    found = by_plain.get(plain) or by_plain.get(re.sub(r"^(sm\d+)[af]$", r"\1", plain))
    if found is None:
        raise UnknownNameError("architecture", text, by_plain.values())
    return found


def _plain(text: str) -> str:
    return re.sub(r"[\s_-]", "", text.lower())


def _claimed(what: str) -> Iterator[str]:
    """Names that manifests of installed backends claim; patterns such as sm80+ are none."""
    for candidate in policy.installed().values():
        for impl in candidate.manifest.impls if candidate.manifest else ():
            names = getattr(impl.requires, what)
            yield from (n for n in ((names,) if isinstance(names, str) else names) if re.fullmatch(r"\w+", n))
