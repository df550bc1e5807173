"""Power, temperatures, clocks and power mode of a Jetson, from sysfs: its NVML has none of them.

INA3221 (all boards) measures voltage and current of three rails each, INA238 (Thor's developer kit) the input's power:
Linux' Documentation/hwmon. Clocks of the GPU are in devfreq. The power mode is what nvpmodel last set. A sensor that
cannot be read is left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rlkernel_core.host.board import read

_CHANNELS: Final = (1, 2, 3)
# Rails that the whole module (Orin Nano, Orin NX) or the whole board (Thor) draws through.
_INPUTS: Final = ("VIN", "VDD_IN")
_GPU: Final = re.compile(r"gpu|ga10b|gv11b")  # devfreq devices: 17000000.gpu, 17000000.ga10b, gpu-gpc-0
_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True)
class Clock:
    """A clock in MHz, and the range that its governor may choose from."""

    mhz: float
    lowest: float
    highest: float

    @property
    def held(self) -> bool:
        """Whether it cannot move: jetson_clocks has been run."""
        return self.lowest == self.highest


@dataclass(frozen=True)
class PowerState:
    """What the board's sensors say now."""

    mode: str | None  # "15W", "MAXN"; None where it is not told
    rails: dict[str, float]  # name -> watts
    celsius: dict[str, float]  # thermal zone -> temperature
    gpu: Clock | None
    over_current: int | None = None  # times the board cut clocks for its supply since it started; None: not counted

    @property
    def watts(self) -> float | None:
        """What the board or module draws: its input rail, else the sum of its rails."""
        whole = next((self.rails[name] for name in _INPUTS if name in self.rails), None)
        return whole if whole is not None or not self.rails else sum(self.rails.values())

    @property
    def watts_of(self) -> str:
        """What `watts` is of."""
        return next((name for name in _INPUTS if name in self.rails), "sum of rails")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {**asdict(self), "watts": self.watts, "watts_of": self.watts_of}


def power(root: Path = Path("/"), ask: Callable[[], str] | None = None) -> PowerState:
    """Read the sensors.

    Args:
        root: where the file system starts.
        ask: the answer of `nvpmodel -q` (see `nvpmodel`), where the files do not say the mode.
    """
    counts = [_number(path) for path in root.glob("sys/class/hwmon/hwmon*/oc*_event_cnt")]
    events = int(sum(c for c in counts if c is not None)) if counts else None
    return PowerState(power_mode(root, ask), dict(_rails(root)), dict(_zones(root)), _gpu(root), events)


def power_mode(root: Path = Path("/"), ask: Callable[[], str] | None = None) -> str | None:
    """Name of the power mode."""
    number = re.search(r"pmode:(\d+)", read(root / "var/lib/nvpmodel/status"))
    modes = re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=(\S+?)\s*>", read(root / "etc/nvpmodel.conf"))
    names: dict[int, str] = {int(i): name for i, name in modes}
    if number and int(number[1]) in names:
        return names[int(number[1])]
    said = re.search(r"NV Power Mode:\s*(\S+)", ask() if ask else "")
    return str(said[1]) if said else None


def nvpmodel() -> str:
    """What `nvpmodel -q` prints; empty where it is not installed or refuses."""
    tool = shutil.which("nvpmodel")
    if tool is None:
        return ""
    try:
        done = subprocess.run(  # noqa: S603 the board's own tool
            [tool, "-q"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _rails(root: Path) -> Iterator[tuple[str, float]]:
    for folder in sorted(root.glob("sys/class/hwmon/hwmon*")):
        chip = read(folder / "name")
        if chip == "ina3221":
            for channel in _CHANNELS:
                name = read(folder / f"in{channel}_label")
                millivolts, milliamperes = (_number(folder / f"{what}{channel}_input") for what in ("in", "curr"))
                if name not in {"", "NC"} and millivolts is not None and milliamperes is not None:
                    yield name, millivolts * milliamperes / 1e6
        elif chip == "ina238" and (microwatts := _number(folder / "power1_input")) is not None:
            yield "VIN", microwatts / 1e6


def _zones(root: Path) -> Iterator[tuple[str, float]]:
    for folder in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        thousandths = _number(folder / "temp")
        if thousandths is not None and thousandths > -100e3:  # -256 degrees: switched off
            yield read(folder / "type").removesuffix("-thermal") or folder.name, thousandths / 1e3


def _gpu(root: Path) -> Clock | None:
    for folder in sorted(root.glob("sys/class/devfreq/*")):
        hertz = [_number(folder / f"{which}_freq") for which in ("cur", "min", "max")]
        if _GPU.search(folder.name) and None not in hertz:
            return Clock(*(h / 1e6 for h in hertz if h is not None))
    return None


def _number(path: Path) -> float | None:
    text = read(path).partition(" ")[0]
    return float(text) if re.fullmatch(r"-?\d+", text) else None
