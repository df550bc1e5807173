"""Names of devices, architectures and dtypes, and what people call the chips: one spelling of each, as data.

Devices and dtypes are named as torch names them, architectures as compilers do, without punctuation: "sm90", "gfx942".
Sources: torch.device; NVIDIA, "CUDA GPU Compute Capability"; AMD, "ROCm: accelerator and GPU hardware specifications".
Imports nothing outside the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_NVIDIA: Final = (
    *("sm70", "sm72", "sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm101", "sm103", "sm110", "sm120"),
    "sm121",
)
_AMD: Final = (
    *("gfx906", "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1103"),
    *("gfx1150", "gfx1151", "gfx1152", "gfx1200", "gfx1201", "gfx1250"),
)
# Device type -> its architectures; of the types without any, none is known to torch. Those after "xpu" are names that
# packages of vendors give to torch's PrivateUse1: torch_npu, torch_mlu, torch_musa, torch_gcu, torch_sdaa.
DEVICES: Final[Mapping[str, tuple[str, ...]]] = {
    "cpu": ("x86_64", "aarch64", "arm64", "AMD64", "ppc64le", "riscv64", "s390x"),
    "cuda": (*_NVIDIA, *_AMD),
    "hpu": (), "ipu": (), "meta": (), "mps": (), "mtia": (), "privateuseone": (), "vulkan": (), "xla": (), "xpu": (),
    "npu": (), "mlu": (), "musa": (), "gcu": (), "sdaa": (),
}  # fmt: skip
GPU: Final = "cuda"  # what torch calls NVIDIA's and AMD's
# What a chip is called -> its architecture; all of them are of the device type GPU.
CHIPS: Final[Mapping[str, str]] = {
    "v100": "sm70", "xavier": "sm72", "t4": "sm75", "a100": "sm80", "a800": "sm80", "a30": "sm80", "a10": "sm86",
    "a40": "sm86", "a6000": "sm86", "rtx3090": "sm86", "orin": "sm87", "l4": "sm89", "l40": "sm89", "l40s": "sm89",
    "rtx4090": "sm89", "h100": "sm90", "h200": "sm90", "h800": "sm90", "h20": "sm90", "gh200": "sm90", "b200": "sm100",
    "gb200": "sm100", "b300": "sm103", "gb300": "sm103", "thor": "sm110", "rtx5090": "sm120", "gb10": "sm121",
    "mi50": "gfx906", "mi100": "gfx908", "mi210": "gfx90a", "mi250": "gfx90a", "mi250x": "gfx90a", "mi300": "gfx942",
    "mi300a": "gfx942", "mi300x": "gfx942", "mi308x": "gfx942", "mi325x": "gfx942", "mi350x": "gfx950",
    "mi355x": "gfx950", "rx7900xtx": "gfx1100", "rx9070": "gfx1201", "rx9070xt": "gfx1201",
}  # fmt: skip
# Other words for a device type. Jetson boards differ in architecture, so their word stands here.
DEVICE_WORDS: Final[Mapping[str, str]] = dict.fromkeys(("amd", "gpu", "hip", "jetson", "nvidia", "rocm"), GPU)
DTYPES: Final = (
    *("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int8", "int16", "int32", "int64", "uint8", "bool"),
)
# Other words for a dtype, torch's own short ones among them.
DTYPE_WORDS: Final[Mapping[str, str]] = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "int": "int32", "long": "int64",
}  # fmt: skip

_NUMBERED: Final = re.compile(r"sm[_-]?(\d+)[af]?(\+?)|gfx[_-]?([0-9a-f]+)", re.IGNORECASE)


def architecture(text: str) -> str:
    """The one spelling of an architecture or of a pattern `sm80+`: "sm90" for sm_90, SM90 and sm90a.

    Anything that is not written as NVIDIA's or AMD's are is left as it is: other vendors name theirs.
    """
    found = _NUMBERED.fullmatch(text)
    if found is None:
        return text
    number, plus, gfx = found.groups()
    return f"sm{number}{plus}" if gfx is None else f"gfx{gfx.lower()}"


def chip(text: str) -> str | None:
    """The architecture of a chip by its name, however it is punctuated: "sm89" for "RTX 4090"; None for no chip."""
    return CHIPS.get(re.sub(r"[\s_-]", "", text.lower()))
