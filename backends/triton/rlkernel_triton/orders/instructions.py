"""Which function executes which instruction of PTX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np

from rlkernel_triton.orders import arithmetic, matrix, movement, tensor_copy
from rlkernel_triton.orders.arithmetic import hash_of
from rlkernel_triton.orders.errors import DataDependentError, UnknownPtxError
from rlkernel_triton.orders.machine import KINDS, Machine, Step, Value, selected
from rlkernel_triton.orders.ptx import Instruction, PtxKernel

_MOVES: Final[Mapping[str, Callable[[Instruction], Step]]] = {
    "cvta": movement.move, "mov": movement.move, "prmt": movement.permute, "shfl": movement.shuffle,
    "redux": movement.reduction,
    "ld": movement.load, "st": movement.store, "cp": movement.copy, "red": movement.atomic,
    "ldmatrix": movement.load_matrix, "stmatrix": movement.store_matrix,
}  # fmt: skip
_COMPUTES: Final[Mapping[str, Callable[[Instruction, str], Step]]] = {
    "setp": arithmetic.comparison, "selp": arithmetic.choice, "cvt": arithmetic.conversion, "mma": matrix.mma,
    "wgmma": matrix.wgmma,
}  # fmt: skip
_IDLE: Final = {"fence", "membar", "griddepcontrol"}  # no effect where an instruction ends before the next begins


def bind(ins: Instruction, kernel: PtxKernel, level: str) -> Step:
    """The function that executes an instruction.

    Raises:
        UnknownPtxError: nobody does.
    """
    if ins.name in {"bra", "ret", "exit"}:
        return _branch(ins)
    if ins.name in {"bar", "barrier"}:
        return lambda _: "bar"
    if ins.name in _IDLE or (ins.name == "mbarrier" and ins.parts[0] != "try_wait"):
        return lambda _: None
    if ins.name == "mbarrier":
        return partial(movement.set_predicate, to=ins.operands[0], where=None)
    if ins.name == "elect":
        return partial(movement.set_predicate, to=ins.operands[0].parts[1], where=0)
    if ins.name == "cp" and "bulk" in ins.parts:
        return tensor_copy.copy_box(ins)
    if ins.name in _MOVES:
        return _MOVES[ins.name](ins)
    if ins.name in _COMPUTES:
        return _COMPUTES[ins.name](ins, level)
    if ins.kind == "pred":
        return arithmetic.predicate_logic(ins, level)
    made = arithmetic.integer_operation(ins, level) or arithmetic.float_operation(ins, level)
    if made is None:
        raise UnknownPtxError("this instruction is not modeled; add it to a table of rlkernel_triton.orders")
    return made


# Instructions between a branch on data and its target that may run in both cases: registers alone, and no branch.
_PURE: Final = frozenset({
    "mov", "add", "sub", "mul", "mad", "fma", "neg", "abs", "max", "min", "and", "or", "xor", "not", "shl", "shr",
    "bfe", "setp", "selp", "cvt", "ex2", "lg2", "rcp", "sqrt", "rsqrt", "div", "prmt",
})  # fmt: skip


def _branch(ins: Instruction) -> Step:
    target = ins.operands[0].name if ins.operands else "ret"

    def step(m: Machine) -> str:
        if ins.guard and (guard := m.registers[ins.guard]).hashes is not None and guard.hashes[m.mask].any():
            _both_ways(m, guard, unless=ins.unless, end=m.kernel.labels.get(target, 0))
            m.taken = m.mask
            return target
        enable = m.active(ins)
        m.taken = m.mask if enable is None else enable & m.mask
        return target

    return step


def _both_ways(m: Machine, guard: Value, *, unless: bool, end: int) -> None:
    """A branch on data over a few instructions: they run, and what they write is chosen as the branch would.

    Raises:
        DataDependentError: there is more between the branch and its target.
    """
    between = range(m.at + 1, end)
    if not between or any(m.kernel.code[i].name not in _PURE for i in between):
        raise DataDependentError("which way it goes depends on data")
    before = dict(m.registers)
    for i in between:
        m.step_at(i)(m)
    for name, new in m.registers.items():
        old = before.get(name)
        if old is new:
            continue
        width = m.kernel.widths[name]
        old = Value(np.zeros(m.T, KINDS[width])) if old is None else old
        kind = "pred" if width == 1 else f"u{width}"
        a, b = (new, old) if unless else (old, new)
        m.registers[name] = selected(guard, a, b, partial(hash_of, kind=kind), max(1, width // 16))
