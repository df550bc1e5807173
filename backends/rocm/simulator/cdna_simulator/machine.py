"""Run a compiled kernel: workgroups in batches, waves in step or one after another, barriers in between.

    kernel = read(compiled.asm["amdgcn"], compiled.metadata.name)
    Machine(kernel, lds=compiled.metadata.shared, warps=4).launch((rows, 1, 1), [x, out, 1500])

Waves of one workgroup either run in step ("step": fastest) or one after another between two barriers, in an order
drawn anew at every barrier (a seed). Every such order is one that hardware may take, so a kernel whose result depends
on it has a race.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from cdna_simulator import access, compare, convert, division, float64, lanes, lds, matrix, scalar
from cdna_simulator import vector as arithmetic
from cdna_simulator.assembly import MANY, Instruction, Kernel, instruction
from cdna_simulator.errors import HangError, SimulationError, UnsupportedKernelError
from cdna_simulator.formats import U8, U32, Array
from cdna_simulator.memory import GlobalMemory, Region
from cdna_simulator.operands import Step, unknown
from cdna_simulator.waves import EXEC, LANES, SCRATCH, VCC, Waves

WAVES_AT_ONCE: Final = 256  # a third of the time of 64; more are no faster, and take more memory
LIMIT: Final = 20_000_000  # instructions of waves that run in step; a loop that does not end
_SCRATCH_BY_OFFSET: Final = ("gfx942", "gfx950")  # others reach it through a buffer descriptor that a wave makes
_UNWRITTEN: Final = 0xFF  # bytes of LDS that nobody has written: a NaN in every float format
# No effect here: caches are not modelled, and an instruction has ended before the next begins.
_IDLE: Final = frozenset({
    "s_waitcnt", "s_nop", "s_setprio", "s_sleep", "s_sethalt", "s_code_end", "s_icache_inv", "s_dcache_wb",
    "buffer_inv", "buffer_wbl2", "buffer_wbinvl1", "buffer_wbinvl1_vol", "buffer_gl0_inv", "v_nop", "s_set_gpr_idx_off",
})  # fmt: skip
# Whether a wave jumps: [W, 1].
BRANCHES: Final[dict[str, Callable[[Waves], Any]]] = {
    "s_branch": lambda w: np.ones((w.W, 1), bool),
    "s_cbranch_scc0": lambda w: ~w.scc,
    "s_cbranch_scc1": lambda w: w.scc,
    "s_cbranch_vccz": lambda w: ~w.s[:, VCC : VCC + 2].any(axis=1, keepdims=True),
    "s_cbranch_vccnz": lambda w: w.s[:, VCC : VCC + 2].any(axis=1, keepdims=True),
    "s_cbranch_execz": lambda w: ~w.s[:, EXEC : EXEC + 2].any(axis=1, keepdims=True),
    "s_cbranch_execnz": lambda w: w.s[:, EXEC : EXEC + 2].any(axis=1, keepdims=True),
}
_BARRIER, _END = "barrier", "end"  # what a step returns to stop a wave


class Machine:
    """One kernel, ready to be launched any number of times."""

    def __init__(self, kernel: Kernel, *, lds: int, warps: int) -> None:
        if (scratch := kernel.facts.get(SCRATCH, 0)) and kernel.arch not in _SCRATCH_BY_OFFSET:
            raise UnsupportedKernelError(
                f"{kernel.name} spills {scratch} bytes a lane to scratch, which is not simulated on {kernel.arch}"
            )
        self.kernel, self.lds, self.warps = kernel, lds, warps
        self.steps: list[Step | None] = [None] * len(kernel.code)
        self.executed = 0  # instructions, of all waves

    def launch(self, grid: tuple[int, int, int], arguments: Sequence[Any], order: int | str = "step") -> None:
        """Run the kernel.

        Args:
            grid: workgroups along x, y and z.
            arguments: contiguous numpy arrays (by reference), pairs of an address and the `Region` that it points into,
                or numbers; missing ones at the end are null pointers.
            order: "step", or the seed of an order of waves.

        Raises:
            SimulationError: the kernel cannot go on; the message names the instruction.
        """
        memory = GlobalMemory()
        segment = self._segment(memory, grid, arguments)
        memory.add(Region(segment, segment.ctypes.data))
        shuffle = random.Random(order) if isinstance(order, int) else None
        with np.errstate(all="ignore"):
            for batch in self._batches(grid):
                self._run(batch, memory, segment.ctypes.data, shuffle)

    def _batches(self, grid: tuple[int, int, int]) -> Iterator[Array]:
        places = np.stack(np.meshgrid(*[np.arange(n) for n in grid[::-1]], indexing="ij"), axis=-1).reshape(-1, 3)[
            :, ::-1
        ]
        several = max(1, WAVES_AT_ONCE // self.warps)
        for first in range(0, len(places), several):
            yield places[first : first + several]

    def _segment(self, memory: GlobalMemory, grid: tuple[int, int, int], arguments: Sequence[Any]) -> Array:
        """The argument segment, at the offsets that the kernel's metadata names; the hidden ones say what is launched.

        LLVM's AMDGPU user guide, "Code object V5 metadata".
        """
        layout = self.kernel.arguments
        shown = [a for a in layout if not a.kind.startswith("hidden_")]
        if len(arguments) > len(shown):
            raise SimulationError(f"{self.kernel.name} takes {len(shown)} arguments, {len(arguments)} were given")
        size = max([a.offset + a.size for a in layout] + [self.kernel.facts.get("kernarg_size", 0), 8])
        segment = np.zeros(-(-size // 64) * 64 + 64, U8)  # hardware rounds up, and scalar loads read ahead
        hidden = {f"hidden_block_count_{axis}": n for axis, n in zip("xyz", grid, strict=True)}
        hidden |= {"hidden_group_size_x": 64 * self.warps, "hidden_group_size_y": 1, "hidden_group_size_z": 1}
        hidden |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": self.lds}
        given = list(zip(shown, arguments, strict=False))
        given += [(place, hidden[place.kind]) for place in layout if place.kind in hidden]
        for place, value in given:
            number, region = _argument(value)
            if region is not None:
                memory.add(region)
            segment[place.offset : place.offset + place.size] = np.frombuffer(_bytes(number, place.size), U8)
        return segment

    def _run(self, places: Array, memory: GlobalMemory, segment: int, shuffle: random.Random | None) -> None:
        """Run a batch of workgroups, [n, 3]."""
        stride = -(-max(self.lds, 4) // 16) * 16
        region = Region(np.full(len(places) * stride, _UNWRITTEN, U8))
        n, warps = len(places), self.warps
        if shuffle is None:
            members = [(np.repeat(np.arange(n), warps), np.tile(np.arange(warps), n))]
        else:
            members = [(np.arange(n), np.full(n, i)) for i in range(warps)]
        parts = []
        for groups, numbers in members:
            waves = Waves(self.kernel, groups, memory, region, stride)
            waves.lds_bytes = self.lds
            self._registers(waves, places[groups], numbers, segment)
            parts.append(waves)
        while parts:
            if shuffle is not None:
                shuffle.shuffle(parts)
            for waves in parts:
                self._advance(waves)
            for waves in parts:
                waves.release()
            parts = [waves for waves in parts if waves.fragments]

    def _registers(self, waves: Waves, places: Array, numbers: Array, segment: int) -> None:
        """What a wave finds in its registers when it starts (LLVM's AMDGPU user guide, "Initial kernel state")."""
        fact = self.kernel.facts.get
        at = 4 * fact("user_sgpr_private_segment_buffer", 0) + 2 * fact("user_sgpr_dispatch_ptr", 0)
        at += 2 * fact("user_sgpr_queue_ptr", 0)
        if fact("user_sgpr_kernarg_segment_ptr", 0):
            waves.s[:, at], waves.s[:, at + 1] = segment & 0xFFFFFFFF, segment >> 32
        at = fact("user_sgpr_count", at)
        for axis, name in enumerate("xyz"):
            if fact(f"system_sgpr_workgroup_id_{name}", int(name == "x")):
                waves.s[:, at] = places[:, axis]
                at += 1
        waves.v[0][...] = LANES.astype(U32) + 64 * numbers.astype(U32)[:, None]

    def _advance(self, waves: Waves) -> None:
        """Run a waves until every wave stands at a barrier or has ended."""
        steps, code, count = self.steps, self.kernel.code, waves.executed
        while waves.fragments:
            at = min(waves.fragments)
            waves.select(waves.fragments.pop(at))
            while True:
                step = steps[at]
                if step is None:
                    step = steps[at] = bind(code[at], self.kernel)
                count += 1
                if count > LIMIT:
                    raise HangError(
                        f"{self.kernel.name} ran {LIMIT} instructions without an end; see `{code[at].text}`"
                    )
                try:
                    went = step(waves)
                except SimulationError as error:
                    raise type(error)(f"{self.kernel.name}, `{code[at].text}`: {error}") from None
                at += 1
                if went is not None:
                    if went is _BARRIER:
                        waves.wait_at_barrier(at)
                        break
                    if went is _END:
                        break
                    target, jumps = went
                    if jumps is None:
                        at = target
                    else:
                        waves.resume_at(target, jumps)
                        waves.resume_at(at, waves.live & ~jumps)
                        break
                if waves.fragments and min(waves.fragments) <= at:  # let the one furthest behind catch up
                    waves.resume_at(at, waves.live)
                    break
        self.executed += (count - waves.executed) * waves.W
        waves.executed = count


def _argument(value: Any) -> tuple[Any, Region | None]:
    """The number that a kernel gets, and the memory that it points into."""
    if isinstance(value, np.ndarray):
        flat = value.reshape(-1).view(U8)
        return flat.ctypes.data, Region(flat, flat.ctypes.data)
    return value if isinstance(value, tuple) else (value, None)


def _bytes(value: Any, size: int) -> bytes:
    """One argument as it lies in the argument segment."""
    if isinstance(value, float | np.floating):
        return struct.pack({2: "<e", 4: "<f", 8: "<d"}[size], value)
    return (int(value) & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def bind(ins: Instruction, kernel: Kernel) -> Step:
    """The function that executes an instruction of a kernel.

    Raises:
        UnknownInstructionError: nobody does.
    """
    if ins.name in BRANCHES:
        return _branch(kernel.labels[ins.operands[0].name], BRANCHES[ins.name], always=ins.name == "s_branch")
    return bound(ins.text)


@lru_cache(MANY)
def bound(line: str) -> Step:
    """The function that executes an instruction that is no branch, in whatever kernel.

    Raises:
        UnknownInstructionError: nobody does.
    """
    ins = instruction(line)
    name = ins.name
    if name in _IDLE:
        return lambda _: None
    if name == "s_barrier":
        return lambda _: _BARRIER
    if name == "s_endpgm":
        return lambda _: _END
    if name.startswith("s_setreg"):
        return _mode(ins)
    if name.startswith("s_load_dword"):
        return access.scalar_load(ins)
    if name in lanes.CROSS_LANE:
        return lanes.CROSS_LANE[name](ins)
    if name.startswith("s_"):
        return scalar.bind(ins)
    if name.startswith("ds_"):
        return lds.bind(ins)
    if name.startswith(("global_", "flat_", "buffer_", "scratch_")):
        return access.bind(ins)
    for family in (arithmetic, compare, convert, matrix, float64, division):
        found = family.bind(ins)
        if found is not None:
            return found
    raise unknown(ins)


def _branch(target: int, test: Callable[[Waves], Any], *, always: bool) -> Step:
    if always:
        return lambda _: (target, None)

    def step(w: Waves) -> Any:
        jumps = test(w) & w.live
        if not jumps.any():
            return None
        return (target, None if (jumps == w.live).all() else jumps)

    return step


def _mode(ins: Instruction) -> Step:
    """s_setreg: of the mode register only the bit that clamps conversions to small floats has an effect here."""
    if "HW_REG_MODE, 23, 1" not in ins.text:
        raise unknown(ins)
    on = ins.text.rstrip().endswith("1")

    def step(w: Waves) -> None:
        w.saturate = on

    return step
