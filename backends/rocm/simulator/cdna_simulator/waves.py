"""Waves that run in step: their registers, which of them and which of their lanes are active, and where each stands.

Legend: W waves; 64 lanes. A vector register is [W, 64], a scalar register [W, 1], both uint32; what is written to
one broadcasts to it. All waves
take one instruction at a time; those that branch apart wait for the one furthest behind.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cdna_simulator.assembly import Kernel
from cdna_simulator.formats import I64, U8, U32, U64, Array
from cdna_simulator.memory import GlobalMemory, Region

LANES: Final = np.arange(64)
VCC, EXEC, M0 = 106, 126, 124
_UNWRITTEN: Final = 0xFFC0DEAD  # a NaN in float32 and in bf16: what nobody wrote shows
SCRATCH: Final = "private_segment_fixed_size"  # bytes a lane, a fact of a kernel


class Waves:
    """The state of W waves."""

    def __init__(self, kernel: Kernel, groups: Array, memory: GlobalMemory, lds: Region, lds_stride: int) -> None:
        W = len(groups)
        self.W, self.arch, self.groups = W, kernel.arch, groups  # groups [W]: position of each wave's workgroup in lds
        self.memory, self.lds, self.lds_bytes = memory, lds, lds_stride
        self.lds_base = (groups.astype(I64) * lds_stride)[:, None]
        self.scratch_bytes = kernel.facts.get(SCRATCH, 0)  # of a lane, one after another
        self.scratch = Region(np.full(W * 64 * self.scratch_bytes // 4, _UNWRITTEN, U32).view(U8))
        file = np.full((kernel.registers, W, 64), _UNWRITTEN, U32)
        self.v = list(file)
        self.s = np.zeros((W, 128), U32)
        self.scc = np.zeros((W, 1), bool)
        self.saturate = False  # MODE.FP16_OVFL: conversions to small floats clamp
        self.executed = 0  # instructions
        self.live = np.ones((W, 1), bool)  # waves of the fragment that runs
        self.fragments: dict[int, Array] = {0: np.ones((W, 1), bool)}  # position -> waves that stand there
        self.waiting: dict[int, Array] = {}  # the same, at a barrier
        self.s[:, EXEC : EXEC + 2] = 0xFFFFFFFF
        self.refresh()

    def refresh(self) -> None:
        """After EXEC or the running fragment has changed."""
        self.all_waves = bool(self.live.all())
        self.mask = bits(self.s[:, EXEC : EXEC + 2]) & self.live
        self.whole = bool(self.mask.all())

    def select(self, live: Array) -> None:
        """Run these waves only."""
        self.live = live
        self.refresh()

    # Vector registers.

    def put(self, index: int, value: Any, enable: Array | None = None) -> None:
        """Write a vector register in the active lanes; `value` broadcasts to [W, 64]."""
        if enable is None and self.whole:
            self.v[index][...] = value
        else:
            np.copyto(self.v[index], value, where=self.mask if enable is None else self.mask & enable)

    def put_half(self, index: int, value: Any, *, high: bool) -> None:
        """Write 16 bits to one half of a vector register."""
        held = self.v[index]
        self.put(index, (held & U32(0xFFFF)) | value << U32(16) if high else (held & U32(0xFFFF0000)) | value)

    def put64(self, index: int, value: Any) -> None:
        """Write a pair of vector registers."""
        self.put(index, (value & U64(0xFFFFFFFF)).astype(U32))
        self.put(index + 1, (value >> U64(32)).astype(U32))

    def put_all_lanes(self, index: int, value: Array) -> None:
        """Write a vector register in all lanes, as matrix instructions do."""
        self._put_live(self.v[index], value)

    # Scalar registers.

    def put_s(self, index: int, value: Any) -> None:
        """Write a scalar register; `value` broadcasts to [W, 1]."""
        self._put_live(self.s[:, index : index + 1], value)
        if index >= EXEC:
            self.refresh()

    def put_s64(self, index: int, value: Any) -> None:
        """Write a pair of scalar registers."""
        self._put_live(self.s[:, index : index + 2].view(U64), value)
        if index >= EXEC:
            self.refresh()

    def _put_live(self, register: Array, value: Any) -> None:
        if self.all_waves:
            register[...] = value
        else:
            np.copyto(register, value, where=self.live)

    def put_scc(self, value: Any) -> None:
        """Write the condition bit."""
        self.scc = np.where(self.live, value, self.scc)

    def put_lanes(self, index: int, where: Array) -> None:
        """Write a mask of lanes, zero in the inactive ones, to a pair of scalar registers."""
        self.put_s64(index, words(where & self.mask))

    # Waves that stand at different places.

    def resume_at(self, position: int, waves: Array) -> None:
        """Let waves continue at a position, once it is their turn."""
        self.fragments[position] = self.fragments[position] | waves if position in self.fragments else waves

    def wait_at_barrier(self, position: int) -> None:
        """The running waves stand at a barrier and go on behind it."""
        at = self.waiting.get(position)
        self.waiting[position] = self.live if at is None else at | self.live

    def release(self) -> None:
        """All waves have reached their barrier."""
        self.fragments, self.waiting = self.waiting, {}


def bits(pair: Array) -> Array:
    """Pairs of scalar registers [W, 2] as masks of lanes [W, 64]."""
    return np.unpackbits(np.ascontiguousarray(pair).view(U8), axis=1, bitorder="little").view(bool)


def words(mask: Array) -> Array:
    """Masks of lanes [W, 64] as 64-bit words [W, 1]."""
    return np.packbits(np.broadcast_to(mask, (len(mask), 64)), axis=1, bitorder="little").view(U64)
