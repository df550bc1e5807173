"""AMD machine code on a CPU: run what a compiler made for gfx90a, gfx942 or gfx950, with every access checked.

    from cdna_simulator import Machine, read

    kernel = read(compiled.asm["amdgcn"], compiled.metadata.name)
    Machine(kernel, lds=compiled.metadata.shared, warps=4).launch((2, 1, 1), [x, out, 1500])

Executes the assembly text; needs numpy and neither torch, Triton nor a GPU. README.md says how exact it is, and what it
does not model.
"""

from cdna_simulator.assembly import Kernel as Kernel
from cdna_simulator.assembly import read as read
from cdna_simulator.errors import HangError as HangError
from cdna_simulator.errors import OutOfBoundsError as OutOfBoundsError
from cdna_simulator.errors import SimulationError as SimulationError
from cdna_simulator.errors import UnknownInstructionError as UnknownInstructionError
from cdna_simulator.errors import UnsupportedKernelError as UnsupportedKernelError
from cdna_simulator.machine import Machine as Machine
from cdna_simulator.memory import GlobalMemory as GlobalMemory
from cdna_simulator.memory import Region as Region
