"""Kernels written by hand for one instruction: registers in, registers out."""

import numpy as np

from cdna_simulator import GlobalMemory, Kernel
from cdna_simulator.assembly import instruction
from cdna_simulator.machine import bind
from cdna_simulator.memory import Region
from cdna_simulator.waves import SCRATCH, Waves


def waves(arch="gfx942", count=1, lds=1024, memory=None, scratch=0):
    """Waves that have run nothing; every wave is a workgroup of its own."""
    kernel = Kernel("hand", arch, (), {}, {SCRATCH: scratch}, (), 300)
    region = Region(np.zeros(count * lds, np.uint8))
    w = Waves(kernel, np.arange(count), memory or GlobalMemory(), region, lds)
    for register in w.v:
        register[...] = 0
    return w


def run(w, *lines):
    """Execute lines, one after another."""
    for line in lines:
        with np.errstate(all="ignore"):
            bind(instruction(line), Kernel("hand", w.arch, (), {}, {}, (), 300))(w)
    return w


def floats(w, index):
    return w.v[index].view(np.float32)
