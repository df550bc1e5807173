"""Runs PTX on a CPU: all threads of some blocks in step, each value with the hash of the expression that it came from.

Threads that branch apart wait for those furthest behind; at a barrier they wait for their block. Asynchronous copies
and matrix products end before the next instruction begins, which is one of the orders that hardware may take.

Legend: T threads of the blocks that run together. A value is [T] or a number, of 16, 32 or 64 bits; its hashes are
[T, pieces], or None where all bits are known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from rlkernel_triton.orders.errors import DataDependentError, NoCertificateError, UnknownPtxError
from rlkernel_triton.orders.expressions import Array, commutative, expression
from rlkernel_triton.orders.memory import GlobalMemory, Region
from rlkernel_triton.orders.ptx import Instruction, Operand, PtxKernel

LIMIT: Final = 5_000_000  # instructions of threads that run in step; a loop that does not end
THREADS_AT_ONCE: Final = 4096
KINDS: Final = {1: np.bool_, 16: np.uint16, 32: np.uint32, 64: np.uint64}
Hashes = Array | None


class Value(NamedTuple):
    """Bits and the hashes of their pieces."""

    bits: Any
    hashes: Hashes = None


Step = Callable[["Machine"], "str | None"]


class Machine:
    """A kernel, and the state of the threads that run.

    Args:
        kernel: its code.
        bind: the function that executes an instruction.
        shared: bytes of shared memory of a block.
        level: "bits" or "order": what the names of operations say (`arithmetic.named`).
    """

    def __init__(
        self, kernel: PtxKernel, bind: Callable[[Instruction, PtxKernel, str], Step], shared: int, level: str = "bits"
    ) -> None:
        self.kernel, self.level = kernel, level
        self._shared = shared
        self._steps: list[Step | None] = [None] * len(kernel.code)
        self._bind = bind
        self.executed = 0
        self.registers: dict[str, Value] = {}
        self.taken: Array = np.zeros(0, bool)  # where the last branch was taken

    def launch(
        self,
        grid: tuple[int, int, int],
        parameters: dict[str, Value],
        memory: GlobalMemory,
        boxes: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        """Run all blocks of a grid; `boxes`: what a descriptor at an address is of (`tensor_copy.Boxes`).

        Raises:
            NoCertificateError: the order cannot be derived; the message names the instruction.
        """
        self.memory, self.parameters, self.grid, self.boxes = memory, parameters, grid, boxes
        x, y, z = grid
        blocks = np.array([(i, j, k) for k in range(z) for j in range(y) for i in range(x)], np.uint32)
        some = max(1, THREADS_AT_ONCE // self.kernel.threads)
        with np.errstate(all="ignore"):
            for first in range(0, len(blocks), some):
                self._run(blocks[first : first + some])

    def _run(self, blocks: Array) -> None:
        threads = self.kernel.threads
        self.blocks, self.T = len(blocks), len(blocks) * threads
        self.thread = np.tile(np.arange(threads), self.blocks)
        self.block = np.repeat(np.arange(self.blocks), threads)
        self.warp_start = np.arange(self.T) & ~31
        self.lane = np.arange(self.T) & 31
        self.specials: dict[str, Any] = {"tid.x": self.thread.astype(np.uint32), "laneid": self.lane.astype(np.uint32)}
        self.specials["warpid"] = (self.thread // 32).astype(np.uint32)
        for i, axis in enumerate("xyz"):
            self.specials[f"ctaid.{axis}"] = blocks[self.block, i]
            self.specials[f"nctaid.{axis}"] = np.uint32(self.grid[i])
            self.specials[f"ntid.{axis}"] = np.uint32(threads if axis == "x" else 1)
        self.specials |= {"tid.y": np.uint32(0), "tid.z": np.uint32(0)}
        stride = -(-max(self._shared, 16) // 1024) * 1024  # a swizzled tile begins at a multiple of 1024 bytes
        self.shared = Region(np.full(stride * self.blocks, 0xFF, np.uint8), 0)
        self.shared_base, self.shared_stride = self.block * stride, stride
        self.registers = {}
        waiting: dict[int, Array] = {}
        standing = {0: np.ones(self.T, bool)}
        count = 0
        while standing or waiting:
            if not standing:
                standing, waiting = waiting, {}
            at = min(standing)
            self._select(standing.pop(at))
            while True:
                if at >= len(self._steps):
                    break
                self.at = at
                count += 1
                if count > LIMIT:
                    raise NoCertificateError(f"{self.kernel.name} ran {LIMIT} instructions without an end")
                try:
                    went = self.step_at(at)(self)
                except NoCertificateError as error:
                    text = _brief(self.kernel.code[at].text)
                    raise type(error)(f"{self.kernel.name}, `{text}`: {error}") from None
                at += 1
                if went is None:
                    pass
                elif went == "bar":
                    waiting[at] = waiting[at] | self.mask if at in waiting else self.mask
                    break
                elif went == "ret":
                    left = self.mask & ~self.taken
                    if left.any():
                        _join(standing, at, left)
                    break
                else:
                    away = self.taken
                    if away.all() if self.whole else not (self.mask & ~away).any():
                        at = self.kernel.labels[went]
                    elif away.any():
                        _join(standing, self.kernel.labels[went], away)
                        _join(standing, at, self.mask & ~away)
                        break
                if standing and min(standing) <= at:
                    _join(standing, at, self.mask)
                    break
        self.executed += count

    def step_at(self, at: int) -> Step:
        """What executes the instruction at a position."""
        step = self._steps[at]
        if step is None:
            step = self._steps[at] = self._bind(self.kernel.code[at], self.kernel, self.level)
        return step

    def _select(self, mask: Array) -> None:
        self.mask, self.whole = mask, bool(mask.all())

    # Operands.

    def read(self, op: Operand, width: int) -> Value:
        """An operand of so many bits."""
        if op.kind == "register":
            try:
                return self.registers[op.name]
            except KeyError:
                # an accumulator that the first product overwrites may never have been written
                return Value(np.zeros(self.T, KINDS[width]))
        if op.kind == "number":
            return Value(KINDS[width](op.value & ((1 << width) - 1)))
        if op.kind == "special":
            return Value(self.specials[op.name])
        if op.kind == "symbol" and op.name in self.parameters:  # the address of one that is a structure
            return Value(KINDS[width](int(self.parameters[op.name].bits)))
        if op.kind == "symbol":
            if op.name not in self.kernel.shared:
                raise UnknownPtxError(f"the variable {op.name} is not modeled")
            return Value(KINDS[width](self.kernel.shared[op.name]))
        raise UnknownPtxError(f"an operand of kind {op.kind} is not modeled here")

    def active(self, ins: Instruction) -> Array | None:
        """The lanes in which a guarded instruction runs; None for all of the running ones.

        Raises:
            DataDependentError: that depends on data.
        """
        if not ins.guard:
            return None
        guard = self.registers[ins.guard]
        if guard.hashes is not None and guard.hashes[self.mask].any():
            raise DataDependentError("whether it runs depends on data")
        run = np.broadcast_to(guard.bits, (self.T,))
        enabled: Array = self.mask & (~run if ins.unless else run)
        return enabled

    def write(self, op: Operand, value: Value, enable: Array | None = None) -> None:
        """Write a register in the running lanes, or in some of them."""
        if op.name == "_":
            return
        if enable is None and self.whole:
            self.registers[op.name] = value
            return
        width = self.kernel.widths[op.name]
        mask = self.mask if enable is None else enable
        old = self.registers.get(op.name) or Value(np.zeros(self.T, KINDS[width]))
        bits = np.where(mask, value.bits, old.bits)
        hashes = None
        if value.hashes is not None or old.hashes is not None:
            n = max(1, width // 16)
            none = np.zeros((self.T, n), np.uint64)
            new, held = (none if h is None else h for h in (value.hashes, old.hashes))
            hashes = np.where(mask[:, None], new, held)
        self.registers[op.name] = Value(bits, hashes)

    def lanes(self, ins: Instruction) -> Array:
        """The threads [k] in which an instruction runs."""
        enable = self.active(ins)
        return np.nonzero(self.mask if enable is None else enable)[0]

    def address(self, op: Operand, threads: Array) -> Array:
        """Addresses [k] of a place in global memory or offsets of one in shared memory.

        Raises:
            DataDependentError: they depend on data.
        """
        if op.name in self.kernel.shared:
            return np.full(len(threads), self.kernel.shared[op.name] + op.value, np.int64)
        base = self.registers[op.name]
        if base.hashes is not None and base.hashes[threads].any():
            raise DataDependentError("where it reads or writes depends on data")
        return np.broadcast_to(base.bits, (self.T,))[threads].astype(np.int64) + op.value

    def region(self, space: str, at: Array, threads: Array) -> tuple[Region, Array]:
        """The memory in which addresses lie, and their offsets in it."""
        if space == "shared":
            if len(at) and (at.min() < 0 or at.max() >= self.shared_stride):
                raise NoCertificateError(f"shared memory ends at {self.shared_stride}, and {int(at.max())} is read")
            return self.shared, at + self.shared_base[threads]
        region = self.memory.find(at)
        return region, at - region.base


def _join(standing: dict[int, Array], at: int, threads: Array) -> None:
    standing[at] = standing[at] | threads if at in standing else threads


def _brief(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) < 120 else f"{text[:117]}..."


def known(values: Sequence[Value]) -> bool:
    """Whether all bits are known in all lanes."""
    return all(v.hashes is None for v in values)


def selected(condition: Value, a: Value, b: Value, hash_of: Callable[[Value], Array], n: int) -> Value:
    """Where a condition, a, else b: a choice between expressions where the condition depends on data."""
    bits = np.where(condition.bits, a.bits, b.bits)
    if known((condition, a, b)):
        return Value(bits)
    shape = np.broadcast_shapes(np.shape(condition.bits), np.shape(a.bits), np.shape(b.bits))
    none = np.zeros((*shape, n), np.uint64)
    held, other = (none if v.hashes is None else v.hashes for v in (a, b))
    hashes = np.where(np.broadcast_to(condition.bits, shape)[..., None], held, other)
    if condition.hashes is not None:
        which = condition.hashes[..., 0]
        x, y = np.broadcast_to(hash_of(a), shape), np.broadcast_to(hash_of(b), shape)
        chosen = np.where(x == y, hashes[..., 0], expression("select", which, x, y))
        one = np.where(x[..., None] == y[..., None], hashes, chosen[..., None] + np.arange(n, dtype=np.uint64))
        hashes = np.where((which != 0)[..., None], one, hashes)
    return Value(bits, hashes)


def both(name: str, a: Value, b: Value) -> Value:
    """Two predicates together: "and", "or" or "xor"."""
    operate = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[name]
    bits = operate(a.bits, b.bits)
    if known((a, b)):
        return Value(bits)
    shape = np.broadcast_shapes(np.shape(a.bits), np.shape(b.bits))
    none = np.zeros((*shape, 1), np.uint64)
    x, y = (np.broadcast_to(none if v.hashes is None else v.hashes, none.shape)[..., 0] for v in (a, b))
    hashes = np.where((x != 0) & (y != 0), np.where(x == y, x, commutative(f"{name}.pred", x, y)), x | y)
    p, q = np.broadcast_to(a.bits, shape), np.broadcast_to(b.bits, shape)
    for own, other, bit in ((x, y, p), (y, x, q)):  # one is known, and decides or does not
        decides = (own == 0) & (other != 0) & ((~bit if name == "and" else bit) if name != "xor" else False)
        hashes = np.where(decides, 0, hashes)
    if name == "xor":
        flips = ((x == 0) & p) | ((y == 0) & q)
        hashes = np.where(flips & (hashes != 0), expression("not.pred", hashes), hashes)
    return Value(bits, hashes[..., None])
