"""What goes wrong on Jetson: releases, wheels without code for its GPU, clocks, one memory for everything, no NVML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from rlkernel.discover import JETSON_ARCHS
from rlkernel.doctor.finding import Finding, note, ok, problem, warning
from rlkernel.doctor.machine import Machine
from rlkernel_core.host.allocator import faults
from rlkernel_core.host.board import Board
from rlkernel_core.host.memory import size

_PAGE: Final = "docs/jetson.md"
_GIB: Final = 1024**3
_OLDEST: Final = 6  # JetPack; torch 2.9 is not built for the CUDA of older ones
_INDEX: Final = "https://pypi.jetson-ai-lab.io"


def install_line(board: Board) -> str:
    """How to get a torch with code for a board's GPU."""
    release = board.release
    if board.kind.arch == "sm110":
        return f"pip install torch --index-url {_INDEX}/sbsa/cu130"
    if release is not None and not release.tegra_driver:
        return f"build torch with TORCH_CUDA_ARCH_LIST=8.7; wheels for Arm servers have no code for Orin ({_PAGE})"
    return f"build torch for your Python with TORCH_CUDA_ARCH_LIST=8.7; {_INDEX}/jp6/cu126 has it for 3.10 ({_PAGE})"


def release(machine: Machine) -> Iterator[Finding]:
    """The board's release of Jetson Linux is known and new enough."""
    board = machine.hardware.board
    if board is None:
        return
    sold, found = board.sold_as, board.release
    words = [sold.name if sold else board.kind.family]
    words += [f"{sold.multiprocessors} multiprocessors, {sold.gb_per_s:g} GB/s"] if sold else []
    if board.l4t is None:
        text = f"{', '.join(words)}; /etc/nv_tegra_release is not here, as in most containers"
        fix = "docker run --runtime nvidia -v /etc/nv_tegra_release:/etc/nv_tegra_release:ro …"
        yield note("jetson/release", text, "JetPack and CUDA are not known", fix)
        return
    words.append(f"Jetson Linux {board.l4t}")
    if found is None or int(found.jetpack.partition(".")[0]) < _OLDEST:
        text = f"{', '.join(words)} is older than JetPack {_OLDEST}"
        yield problem("jetson/old", text, "no torch that rlkernel is tested with runs on it", "flash a newer JetPack")
        return
    words += [f"JetPack {found.jetpack}", f"CUDA {found.cuda}", f"its Python is {found.python}"]
    yield ok("jetson/board", ", ".join(words))


def hidden(machine: Machine) -> Iterator[Finding]:
    """What torch sees is named by the files too."""
    torch = machine.torch
    if machine.hardware.board is not None or torch is None:
        return
    found = [device for device in torch.devices if device.arch in JETSON_ARCHS]
    if found:
        text = f"torch sees a Jetson's GPU ({found[0].arch}), and no file here names the board: a container hides them"
        cost = "release, power mode, clocks and memory are not examined"
        yield note("jetson/hidden", text, cost, "docker run --runtime nvidia -v /sys/devices:/sys/devices:ro …")


def wheel(machine: Machine) -> Iterator[Finding]:
    """The build of torch has code for the board's GPU, whether or not torch sees it."""
    board, torch = machine.hardware.board, machine.torch
    if board is None or torch is None or torch.error or not torch.archs:
        return
    listed = ", ".join(torch.archs)
    if torch.covers(board.kind.arch):
        yield ok("jetson/wheel", f"torch {torch.version} has code for {listed}: {board.kind.arch} runs")
    elif not torch.devices:  # otherwise torch/no-code says it
        text = f"torch {torch.version} has code for {listed}: none for {board.kind.arch}"
        yield problem("jetson/wheel", text, "its kernels fail at their first launch", install_line(board))


def nvml(machine: Machine) -> Iterator[Finding]:
    """What NVML does not tell here."""
    if machine.hardware.board is None:
        return
    said = "nvidia-smi is here and leaves most fields empty" if machine.hardware.nvidia_tool else "nvidia-smi is absent"
    text = f"{said}: this GPU's clocks, power and memory are not in NVML"
    cost = "an out-of-memory error of torch may read `NVML_SUCCESS == r INTERNAL ASSERT FAILED`"
    yield note("jetson/nvml", text, cost, "rlkernel memory, rlkernel doctor and rlkernel bench read the board's files")


def clocks(machine: Machine) -> Iterator[Finding]:
    """Power mode, power, temperature, and whether the GPU's clock stands still."""
    state = machine.hardware.power
    if state is None:
        return
    words = [f"power mode {state.mode}" if state.mode else "power mode unknown"]
    words += [f"{state.watts:.1f} W ({state.watts_of})"] if state.watts is not None else []
    words += [f"{max(state.celsius.values()):.0f} °C at most"] if state.celsius else []
    gpu = state.gpu
    words += [f"GPU at {gpu.mhz:.0f} MHz of {gpu.lowest:.0f} to {gpu.highest:.0f}"] if gpu else []
    if gpu is None or gpu.held:
        yield ok("jetson/clocks", ", ".join(words))
    else:
        cost = "speed follows mode and load; two measurements may differ by a factor of 2 to 4"
        fix = "sudo nvpmodel -q --verbose lists the modes; sudo nvpmodel -m ID, then sudo jetson_clocks"
        yield note("jetson/clocks", f"{', '.join(words)}: it moves", cost, fix)


def shared(machine: Machine) -> Iterator[Finding]:
    """There is memory to take, and none of it is swap in disguise."""
    memory = machine.hardware.memory
    if memory is None:
        return
    text = f"memory: {memory.describe()}, {size(memory.budget)} to take, {size(memory.piece)} a piece"
    if memory.budget < _GIB:
        fix = "sudo systemctl set-default multi-user.target (no desktop) and reboot; rlkernel memory shows what is what"
        yield warning("jetson/memory", text, "models that need more are refused, or swap", fix)
    else:
        yield ok("jetson/memory", text)
    if memory.zram:
        text = f"{size(memory.zram)} of swap are zram: compressed memory, which takes from the same memory"
        cost = "near the limit, programs slow down by orders of magnitude before any of them fails"
        yield note("jetson/zram", text, cost, "sudo systemctl disable nvzramconfig, and a swap file on NVMe")


def allocator(machine: Machine) -> Iterator[Finding]:
    """The environment asks torch for nothing that fails on Tegra."""
    if machine.hardware.board is None:
        return
    for fault in faults(machine.environ):
        if fault.fatal:
            yield problem("jetson/allocator", fault.setting, fault.why, fault.fix)
        else:
            yield warning("jetson/allocator", fault.setting, fault.why, fault.fix)


CHECKS: Final[tuple[Callable[[Machine], Iterator[Finding]], ...]] = (
    release,
    hidden,
    wheel,
    nvml,
    clocks,
    shared,
    allocator,
)
