"""AMD machine code on a CPU: run what a compiler made for gfx90a, gfx942 or gfx950, with every access checked.

    from rlkernel_rocm.simulator import Machine, read

    kernel = read(compiled.asm["amdgcn"], compiled.metadata.name)
    Machine(kernel, lds=compiled.metadata.shared, warps=4).launch((2, 1, 1), [x, out, 1500])

Executes the assembly text; needs numpy and neither torch, Triton nor a GPU. See docs/rocm.md for what it cannot tell.
"""

from rlkernel_rocm.simulator.assembly import Kernel as Kernel
from rlkernel_rocm.simulator.assembly import read as read
from rlkernel_rocm.simulator.faults import HangError as HangError
from rlkernel_rocm.simulator.faults import OutOfBoundsError as OutOfBoundsError
from rlkernel_rocm.simulator.faults import SimulationError as SimulationError
from rlkernel_rocm.simulator.faults import UnknownInstructionError as UnknownInstructionError
from rlkernel_rocm.simulator.faults import UnsupportedKernelError as UnsupportedKernelError
from rlkernel_rocm.simulator.machine import Machine as Machine
from rlkernel_rocm.simulator.memory import Bank as Bank
from rlkernel_rocm.simulator.memory import GlobalMemory as GlobalMemory
