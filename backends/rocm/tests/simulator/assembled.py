"""Kernels written by hand for one instruction: registers in, registers out."""

import numpy as np

from rlkernel_rocm.simulator import GlobalMemory, Kernel
from rlkernel_rocm.simulator.assembly import instruction
from rlkernel_rocm.simulator.machine import bind
from rlkernel_rocm.simulator.memory import Bank
from rlkernel_rocm.simulator.team import Team


def team(arch="gfx942", waves=1, lds=1024, memory=None):
    """Waves that have run nothing; every wave is a workgroup of its own."""
    kernel = Kernel("hand", arch, (), {}, {}, (), 300)
    bank = Bank(np.zeros(waves * lds, np.uint8))
    t = Team(kernel, np.arange(waves), memory or GlobalMemory(), bank, lds)
    for register in t.v:
        register[...] = 0
    return t


def run(t, *lines):
    """Execute lines, one after another."""
    for line in lines:
        with np.errstate(all="ignore"):
            bind(instruction(line), Kernel("hand", t.arch, (), {}, {}, (), 300))(t)
    return t


def floats(t, index):
    return t.v[index].view(np.float32)
