"""File systems of boards, written down: what sysfs and procfs of each show, as far as it is read.

Contents follow what owners have posted (AGX Thor: jetson_stats #711; AGX Orin's sensors: alumet #212; Orin Nano:
jetson_stats' API dump), Linux' ABI documents for hwmon, devfreq and thermal zones, and NVIDIA's nvpmodel files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

KIB_8GB = 7990 * 1024  # MemTotal of an 8 GB module is smaller than its memory: carve-outs


def meminfo(total: int, available: int, free: int, swap: int = 0) -> str:
    """/proc/meminfo from sizes in KiB."""
    rows = {
        "MemTotal": total,
        "MemFree": free,
        "MemAvailable": available,
        "Buffers": 40 << 10,
        "Cached": 1200 << 10,
        "SwapTotal": swap,
        "SwapFree": swap,
        "Shmem": 30 << 10,
        "SReclaimable": 60 << 10,
    }
    return "".join(f"{name}:{' ' * 8}{kib} kB\n" for name, kib in rows.items())


def ina3221(folder: str, *rails: tuple[str, int, int]) -> dict[str, str]:
    """A sensor of up to three rails: name, mV, mA; and its sum of shunt voltages, which is no rail."""
    files = {f"{folder}/name": "ina3221\n", f"{folder}/in7_label": "sum of shunt voltages\n"}
    for i, (name, millivolts, milliamperes) in enumerate(rails, 1):
        files |= {f"{folder}/in{i}_label": f"{name}\n", f"{folder}/in{i}_input": f"{millivolts}\n"}
        files |= {f"{folder}/curr{i}_input": f"{milliamperes}\n"}
    return files


def zones(**celsius: float) -> dict[str, str]:
    """Thermal zones."""
    files = {}
    for i, (name, degrees) in enumerate(celsius.items()):
        files[f"sys/class/thermal/thermal_zone{i}/type"] = f"{name}-thermal\n"
        files[f"sys/class/thermal/thermal_zone{i}/temp"] = f"{int(degrees * 1000)}\n"
    return files


def clock(device: str, now: int, low: int, high: int) -> dict[str, str]:
    """A devfreq device, MHz."""
    rows = {"cur": now, "min": low, "max": high}
    return {f"sys/class/devfreq/{device}/{name}_freq": f"{mhz}000000\n" for name, mhz in rows.items()}


def release(text: str) -> dict[str, str]:
    major, _, revision = text.partition(".")
    line = f"# R{major} (release), REVISION: {revision}, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: …\n"
    return {"etc/nv_tegra_release": line}


def tree(model: str, *compatible: str) -> dict[str, str]:
    return {"proc/device-tree/model": f"{model}\0", "proc/device-tree/compatible": "\0".join(compatible) + "\0"}


ORIN_NANO_POWER = {
    **ina3221("sys/class/hwmon/hwmon1", ("VDD_IN", 5080, 1200), ("VDD_CPU_GPU_CV", 5072, 300), ("VDD_SOC", 5072, 290)),
    "sys/class/hwmon/hwmon3/name": "soctherm_oc\n",
    "sys/class/hwmon/hwmon3/oc1_event_cnt": "0\n",
    "sys/class/hwmon/hwmon3/oc3_event_cnt": "4\n",
    **zones(cpu=48.5, gpu=47.0, cv0=-256),
    **clock("17000000.gpu", 306, 306, 1020),
    "var/lib/nvpmodel/status": "pmode:0002 fmode:quiet\n",
    "etc/nvpmodel.conf": "".join(
        f"< POWER_MODEL ID={i} NAME={name} >\n" for i, name in enumerate(("15W", "25W", "MAXN_SUPER"))
    ),
}
ORIN_NANO = {
    **tree(
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        "nvidia,p3768-0000+p3767-0005-super",
        "nvidia,p3767-0005",
        "nvidia,tegra234",
    ),
    **release("36.4.3"),
    "proc/meminfo": meminfo(KIB_8GB, 6200 << 10, 350 << 10, 4 << 20),
    "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 2097152 0 5\n/swapfile file 2097152 0 -2\n",
    **ORIN_NANO_POWER,
}
ORIN_NX = {
    **tree("NVIDIA Jetson Orin NX", "nvidia,p3768-0000+p3767-0000", "nvidia,p3767-0000", "nvidia,tegra234"),
    **release("36.5.0"),
}
AGX_ORIN = {
    **tree(
        "NVIDIA Jetson AGX Orin Developer Kit", "nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"
    ),
    **release("39.2.0"),
    **ina3221(
        "sys/class/hwmon/hwmon2", ("VDD_GPU_SOC", 19000, 500), ("VDD_CPU_CV", 19000, 100), ("VIN_SYS_5V0", 4992, 800)
    ),
    **ina3221("sys/class/hwmon/hwmon3", ("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 4992, 100), ("NC", 0, 0)),
    **clock("17000000.gpu", 1300, 1300, 1300),
    "proc/meminfo": meminfo(62 << 20, 55 << 20, 20 << 20),
}
THOR = {
    **tree(
        "NVIDIA Jetson AGX Thor Developer Kit", "nvidia,p4071-0000+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"
    ),
    **release("38.2.0"),
    **ina3221("sys/class/hwmon/hwmon1", ("VDD_GPU", 12000, 1000), ("VDD_CPU_SOC_MSS", 12000, 900)),
    "sys/class/hwmon/hwmon4/name": "ina238\n",
    "sys/class/hwmon/hwmon4/power1_input": "46250000\n",
    **clock("gpu-gpc-0", 1575, 318, 1575),
    "proc/meminfo": meminfo(122 << 20, 115 << 20, 100 << 20),
}
# What Docker leaves of it: /sys/firmware is masked, /etc is the image's.
CONTAINER = {
    "sys/devices/soc0/family": "jep106:036b\n",
    "sys/devices/soc0/soc_id": "jep106:036b:0023\n",
    "sys/devices/soc1/family": "Tegra\n",
    "sys/devices/soc1/machine": "NVIDIA Jetson Orin Nano Developer Kit\n",
    "sys/devices/soc1/soc_id": "35\n",
    "proc/meminfo": ORIN_NANO["proc/meminfo"],
    "sys/fs/cgroup/memory.max": f"{2 << 30}\n",
    "sys/fs/cgroup/memory.current": f"{1536 << 20}\n",
    "sys/fs/cgroup/memory.stat": f"anon {1024 << 20}\ninactive_file {256 << 20}\nactive_file {256 << 20}\n",
}
XAVIER = {
    **tree("NVIDIA Jetson Xavier NX", "nvidia,p3509-0000+p3668-0000", "nvidia,tegra194"),
    **release("35.4.1"),
}
# Not Jetson, though Arm, NVIDIA or with one memory for all.
NEAR = {
    "GH200": {"sys/class/dmi/id/product_name": "P4352\n", "sys/class/dmi/id/sys_vendor": "NVIDIA\n"},
    "GB10": {"sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n", "sys/devices/soc0/family": "jep106:0426\n"},
    "Raspberry Pi": tree("Raspberry Pi 5 Model B", "raspberrypi,5-model-b", "brcm,bcm2712"),
    "Tegra X1 tablet": tree("Google Pixel C", "google,smaug", "nvidia,tegra210"),
    "an x86 server with a file that is left over": release("36.4.3"),
    "another chip": {"sys/devices/soc0/family": "Samsung Exynos\n", "sys/devices/soc0/soc_id": "35\n"},
    "a folder": {},
}


def plant(root: Path, files: Mapping[str, str]) -> Path:
    """Write a board's files under a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root
