"""What stops a simulated kernel: an instruction that is not modeled, an access outside its memory, a hang.

SimulationError
├── UnknownInstructionError   the instruction, which is named, is not modeled
├── OutOfBoundsError          an address outside what the launch was given, in global memory or LDS
├── HangError                 more instructions than the limit, or a barrier that a wave never reaches
└── UnsupportedKernelError    scratch memory, or an architecture without 64-wide waves
"""

from __future__ import annotations


class SimulationError(Exception):
    """A simulated kernel cannot go on."""


class UnknownInstructionError(SimulationError):
    """The instruction, or one of its modifiers, is not modeled."""


class OutOfBoundsError(SimulationError):
    """An access outside the memory that the launch was given."""


class HangError(SimulationError):
    """The kernel does not end."""


class UnsupportedKernelError(SimulationError):
    """The kernel needs something that the simulator does not have."""
