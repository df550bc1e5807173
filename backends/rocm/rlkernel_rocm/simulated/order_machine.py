"""Runs AMD machine code in the simulator, and beside every value the hash of the expression that it came from.

An instruction that moves 16 or 32 bits is run once more for each plane of hashes (`order_memory`); one that computes on
data makes a new expression. Control flow, addresses and integers are known, or there is no certificate.

Legend: W waves; 64 lanes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from cdna_simulator import Machine
from cdna_simulator.assembly import Instruction, Kernel, Operand, instruction
from cdna_simulator.lanes import dpp, sdwa
from cdna_simulator.machine import BRANCHES, bind
from cdna_simulator.operands import Step, bits32, broadcast
from cdna_simulator.waves import EXEC, VCC, Waves, bits
from rlkernel_rocm.simulated.order_matrix import matrix
from rlkernel_rocm.simulated.order_memory import PLANES, Hashes, to_pieces, to_planes, word
from rlkernel_triton.orders import expressions as e
from rlkernel_triton.orders.arithmetic import float_expression
from rlkernel_triton.orders.errors import DataDependentError, NoCertificateError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.machine import Value, both
from rlkernel_triton.orders.memory import GlobalMemory

# Registers that no kernel has, in which a plane takes the place of data.
_TO, _FROM, _LAST, _SCALAR = 900, 920, 1024, 110
# Instructions that move data -> which of their operands are data that they read.
_MOVES: Final[Mapping[str, tuple[int, ...]]] = {
    "v_mov_b32": (1,), "v_mov_b64": (1,), "v_accvgpr_read_b32": (1,), "v_accvgpr_write_b32": (1,),
    "v_accvgpr_mov_b32": (1,), "ds_bpermute_b32": (2,), "ds_permute_b32": (2,), "ds_swizzle_b32": (1,),
    "v_perm_b32": (1, 2), "v_readlane_b32": (1,), "v_readfirstlane_b32": (1,), "v_pk_mov_b32": (1, 2),
    "v_pack_b32_f16": (1, 2), "v_cndmask_b32": (1, 2),
}  # fmt: skip
_SHIFTS: Final = ("v_lshlrev_b32", "v_lshrrev_b32")
_HALVES: Final = {0xFFFF, 0xFFFF0000}
_SETS_SCC: Final = re.compile(
    r"s_(cmp|bitcmp|add|sub|and|or|xor|andn2|orn2|nand|nor|xnor|lsh|ashr|bfe|not|abs|min|max)"
)
# Functions of one or more floats -> their name and what they are of `float_expression`.
_FLOATS: Final[Mapping[str, tuple[str, str]]] = {
    "v_add_f32": ("add.f32", "add"), "v_sub_f32": ("sub.f32", "sub"), "v_mul_f32": ("mul.f32", "mul"),
    "v_max_f32": ("max.f32", "max"), "v_min_f32": ("min.f32", "min"), "v_fma_f32": ("fma.f32", "fma"),
    "v_pk_add_f32": ("add.f32", "add"), "v_pk_mul_f32": ("mul.f32", "mul"), "v_pk_fma_f32": ("fma.f32", "fma"),
    "v_exp_f32": ("exp2.f32", ""), "v_log_f32": ("log2.f32", ""), "v_rcp_f32": ("rcp.f32", ""),
    "v_rsq_f32": ("rsqrt.f32", ""), "v_sqrt_f32": ("sqrt.f32", ""),
}  # fmt: skip
# Those that hardware rounds as it likes; the level "bits" keeps their own name.
_APPROXIMATE: Final = {"v_exp_f32", "v_log_f32", "v_rcp_f32", "v_rsq_f32", "v_sqrt_f32"}
# Where the accumulator and the constant of a multiply-add stand among its operands.
_MULTIPLY_ADD: Final[Mapping[str, tuple[int, int, int]]] = {
    "v_fmac_f32": (1, 2, 0), "v_mac_f32": (1, 2, 0), "v_fmaak_f32": (1, 2, 3), "v_fmamk_f32": (1, 2, 3),
}  # fmt: skip
# Tests of floats -> (name, whether the operands are exchanged, whether their order does not count)
_TESTS: Final[Mapping[str, tuple[str, bool, bool]]] = {
    "lt": ("lt", False, False), "gt": ("lt", True, False), "le": ("le", False, False), "ge": ("le", True, False),
    "nge": ("ltu", False, False), "nle": ("ltu", True, False), "ngt": ("leu", False, False),
    "nlt": ("leu", True, False), "eq": ("eq", False, True), "nlg": ("equ", False, True), "lg": ("ne", False, True),
    "neq": ("neu", False, True), "o": ("num", False, True), "u": ("nan", False, True),
}  # fmt: skip
_LOGIC: Final[Mapping[str, tuple[str, bool]]] = {  # -> (operation, whether the second operand is inverted)
    "s_and_b64": ("and", False), "s_or_b64": ("or", False), "s_xor_b64": ("xor", False), "s_andn2_b64": ("and", True),
    "s_orn2_b64": ("or", True),
}  # fmt: skip


class OrderMachine(Machine):
    """One kernel, whose values have hashes.

    Args:
        kernel: its code.
        lds: bytes of LDS of a workgroup.
        warps: waves of a workgroup.
        memory: tensors and the hashes of their elements.
        level: "bits" or "order".
    """

    def __init__(self, kernel: Kernel, *, lds: int, warps: int, memory: GlobalMemory, level: str) -> None:
        super().__init__(kernel, lds=lds, warps=warps)
        self._memory, self._level = memory, level
        self._hashes: dict[Waves, Hashes] = {}
        self.steps = [self._step(ins) for ins in kernel.code]

    def of(self, w: Waves) -> Hashes:
        """The hashes of some waves."""
        found = self._hashes.get(w)
        if found is None:
            self._hashes.clear()  # of waves that have ended
            found = self._hashes[w] = Hashes(w, self._memory)
            w.v.extend(np.zeros((w.W, 64), np.uint32) for _ in range(_LAST - len(w.v)))
        return found

    def _step(self, ins: Instruction) -> Step:
        made: list[Step] = []

        def step(w: Waves) -> Any:
            try:
                if not made:
                    made.append(self._made(ins))
                return made[0](w)
            except NoCertificateError as error:
                raise type(error)(f"{self.kernel.name}, `{ins.text}`: {error}") from None

        return step

    def _made(self, ins: Instruction) -> Step:
        name, run = ins.name, bind(ins, self.kernel)
        if name in BRANCHES:
            return self._branch(ins, run)
        if not ins.operands or name in {"s_barrier", "s_endpgm"}:
            return run
        if re.match(r"(global|flat|buffer)_atomic|buffer_atomic", name):
            return self._known_only(ins, run)
        if re.match(r"ds_(read|write)|(global|flat|buffer)_(load|store)", name):
            return self._access(ins, run)
        if name.startswith("s_"):
            return self._scalar(ins, run)
        if (found := matrix(ins, run, self._level, self.of)) is not None:
            return found
        return self._vector(ins, run)

    # Control.

    def _branch(self, ins: Instruction, run: Step) -> Step:
        def step(w: Waves) -> Any:
            h = self.of(w)
            unknown = h.scc_unknown if "scc" in ins.name else "vcc" in ins.name and VCC in h.masks
            if unknown and "s_branch" != ins.name:
                raise DataDependentError("which way it goes depends on data")
            return run(w)

        return step

    def _known_only(self, ins: Instruction, run: Step) -> Step:
        def step(w: Waves) -> Any:
            if any(self._unknown(w, op) for op in ins.operands):
                raise NoCertificateError("data is added in the order of arrival")
            return run(w)

        return step

    def _unknown(self, w: Waves, op: Operand, *, anywhere: bool = False) -> bool:
        """Whether some bit of an operand is not known: in the lanes that run, or in any."""
        h, mask = self.of(w), None if anywhere else w.mask
        return op.kind in {"v", "s"} and (h.any_of(op.kind, op.index, op.count, mask) or self._mask(h, op))

    @staticmethod
    def _mask(h: Hashes, op: Operand) -> bool:
        return op.kind == "s" and any(i in h.masks for i in range(op.index - 1, op.index + op.count))

    # Movement.

    def _plane(self, ins: Instruction, data: tuple[int, ...], to: int | None) -> tuple[Step, dict[int, Operand]]:
        """The instruction on scratch registers in place of its data: constants are known, which is 0."""
        opcode, _, rest = ins.text.partition(" ")
        parts = [p.strip() for p in rest.split(",", len(ins.operands) - 1)]
        parts[-1], _, modifiers = parts[-1].partition(" ")
        moved = {}
        for place, i in enumerate(data):
            op = ins.operands[i]
            if op.kind == "k":
                parts[i] = "0"
            else:
                moved[_FROM + 8 * place] = op
                parts[i] = _register("v", _FROM + 8 * place, op.count)
        if to is not None:
            op = ins.operands[to]
            parts[to] = _register("s", _SCALAR, op.count) if op.kind == "s" else _register("v", _TO, op.count)
        return bind(instruction(f"{opcode} {', '.join(parts)} {modifiers}".strip()), self.kernel), moved

    def _moved(self, ins: Instruction, run: Step, data: tuple[int, ...], to: int | None, *, memory: str = "") -> Step:
        """Runs it for the data and for each plane."""
        once, moved = self._plane(ins, data, to)
        target = None if to is None else ins.operands[to]

        def step(w: Waves) -> Any:
            h = self.of(w)
            quiet = not any(self._unknown(w, ins.operands[i], anywhere=True) for i in data) and not memory
            if quiet and (target is None or not self._unknown(w, target, anywhere=True)):
                return run(w)
            planes = {at: self._held(h, op) for at, op in moved.items()}
            held = None if target is None or target.kind == "s" else self._held(h, target)
            found = []
            real = w.memory, w.lds
            for k in range(PLANES):
                for at, x in planes.items():
                    for r, register in enumerate(x):
                        w.v[at + r] = np.ascontiguousarray(np.broadcast_to(register[k], (w.W, 64)))
                if held is not None:
                    for r, register in enumerate(held):
                        w.v[_TO + r] = register[k].copy()
                if memory == "global":
                    w.memory = h.memory[k]  # type: ignore[assignment]  # the same methods
                elif memory == "lds":
                    w.lds = h.lds[k]
                try:
                    once(w)
                finally:
                    w.memory, w.lds = real
                if target is not None and target.kind == "s":
                    found.append(w.s[:, _SCALAR : _SCALAR + target.count].copy())
                elif target is not None:
                    found.append(np.stack([w.v[_TO + r] for r in range(target.count)]))
            went = run(w)
            if target is not None:
                self._put_planes(w, target, np.stack(found))
            return went

        return step

    @staticmethod
    def _held(h: Hashes, op: Operand) -> list[Array]:
        """Planes of an operand's registers, [4, W, 64 or 1] each."""
        if op.kind == "v":
            return [h.planes(op.index + r) for r in range(op.count)]
        return [h.scalar[:, :, op.index + r : op.index + r + 1] for r in range(op.count)]

    def _put_planes(self, w: Waves, op: Operand, planes: Array) -> None:
        h = self.of(w)
        if op.kind == "s":
            h.scalar[:, w.live[:, 0], op.index : op.index + op.count] = planes[:, w.live[:, 0]]
            _forget(h, op)
            return
        for r in range(op.count):
            h.put(op.index + r, planes[:, r])

    def _access(self, ins: Instruction, run: Step) -> Step:
        name = ins.name
        if "lds" in name.split("_") or "lds" in ins.modifiers:
            raise NoCertificateError("loads from global memory into LDS are not modeled")
        space = "lds" if name.startswith("ds_") else "global"
        data: tuple[int, ...] = ()
        to: int | None = None
        if "load" in name or "read" in name:
            to = 0
            control = ins.operands[1:]
        elif name.startswith("ds_write2"):
            data, control = (1, 2), ins.operands[:1]
        elif name.startswith("buffer"):
            data, control = (0,), ins.operands[1:]
        else:
            data, control = (1,), (ins.operands[0], *ins.operands[2:])
        moved = self._moved(ins, run, data, to, memory=space)

        def step(w: Waves) -> Any:
            if any(self._unknown(w, op) for op in control):
                raise DataDependentError("where it reads or writes depends on data")
            return moved(w)

        return step

    # Scalars.

    def _scalar(self, ins: Instruction, run: Step) -> Step:
        name, ops = ins.name, ins.operands
        if name.startswith("s_load"):
            return self._scalar_load(ins, run)
        sources = ops if name.startswith(("s_cmp", "s_bitcmp")) else ops[1:]
        reads_scc = "cselect" in name or "addc" in name or "subb" in name

        def step(w: Waves) -> Any:
            h = self.of(w)
            unknown = any(self._unknown(w, op) for op in sources)
            if reads_scc and h.scc_unknown:
                raise DataDependentError("which value it takes depends on data")
            mask = planes = None
            if unknown and name in {"s_mov_b32", "s_mov_b64"}:
                op = sources[0]
                mask = h.masks.get(op.index)
                planes = h.scalar[:, :, op.index : op.index + op.count].copy()
            elif unknown and (name in _LOGIC or name == "s_not_b64"):
                mask = self._logic(w, name, sources)
            elif unknown:
                raise DataDependentError("a scalar is computed from data")
            if _SETS_SCC.match(name):
                h.scc_unknown = mask is not None and bool(mask.any())
            to = None if name.startswith(("s_cmp", "s_bitcmp")) else ops[0]
            if to is not None and to.index >= EXEC and mask is not None and mask[w.live[:, 0]].any():
                raise DataDependentError("which lanes run depends on data")
            went = run(w)
            if to is not None and to.kind == "s":
                h.scalar[:, w.live[:, 0], to.index : to.index + to.count] = (
                    0 if planes is None else planes[:, w.live[:, 0], : to.count]
                )
                _forget(h, to)
                if mask is not None and mask.any():
                    h.masks[to.index] = mask
            return went

        return step

    def _scalar_load(self, ins: Instruction, run: Step) -> Step:
        to = ins.operands[0]

        def step(w: Waves) -> Any:
            h, found, real, memory = self.of(w), [], w.s, w.memory
            for k in range(PLANES):
                w.s, w.memory = real.copy(), h.memory[k]  # type: ignore[assignment]  # the same methods
                try:
                    run(w)
                    found.append(w.s[:, to.index : to.index + to.count])
                finally:
                    w.s, w.memory = real, memory
            went = run(w)
            self._put_planes(w, to, np.stack(found))
            return went

        return step

    def _logic(self, w: Waves, name: str, sources: tuple[Operand, ...]) -> Array:
        """[W, 64] hashes of an operation on masks of lanes."""
        values = [self._lanes(w, op) for op in sources]
        if name == "s_not_b64":
            return _inverted(values[0]).hashes[..., 0]  # type: ignore[index]  # some bit is not known
        operation, inverts = _LOGIC[name]
        a, b = values
        made = both(operation, a, _inverted(b) if inverts else b).hashes
        return np.zeros((w.W, 64), U64) if made is None else np.broadcast_to(made[..., 0], (w.W, 64)).copy()

    def _lanes(self, w: Waves, op: Operand) -> Value:
        """A mask of lanes: bits [W, 64] and hashes."""
        if op.kind == "k":
            return Value(np.full((w.W, 64), bool(op.value)))
        held = self.of(w).masks.get(op.index)
        return Value(bits(w.s[:, op.index : op.index + 2]), None if held is None else held[..., None])

    # Vectors.

    def word(self, w: Waves, ins: Instruction, i: int, part: int = 0) -> Array:
        """[W, 64] hash of 32 bits of operand i, as the instruction reads it: moved, cut, with its bars and sign."""
        op = replace(ins.operands[i], negate=False, absolute=False, index=ins.operands[i].index + part, count=1)
        read = bits32(op) if op.kind != "k" else bits32(op, 0)
        value = broadcast(lambda w: np.asarray(read(w)))
        h = self.of(w)
        planes: list[Callable[[Waves], Array]] = [value]
        if op.kind in {"v", "s"} and h.any_of(op.kind, op.index, 1):
            held = self._held(h, op)[0]
            planes += [broadcast(lambda _, k=k: held[k]) for k in range(PLANES)]  # type: ignore[misc]
        if ins.encoding == "dpp" and i == 1:
            planes = [lambda w, r=r: dpp(ins, r)(w)[0] for r in planes]  # type: ignore[misc]
        if ins.encoding == "sdwa" and i in {1, 2}:
            planes = [sdwa(ins, i - 1, r) for r in planes]
        x = [np.broadcast_to(r(w), (w.W, 64)) for r in planes]
        made = e.constant(x[0], 32) if len(x) == 1 else word(to_pieces(np.stack(x[1:])), x[0])
        if ins.operands[i].absolute:
            made = e.expression("abs.f32", made & ~U64(8)) if len(x) > 1 else made & ~U64(8)
        return e.negated(made) if ins.operands[i].negate else made

    def _vector(self, ins: Instruction, run: Step) -> Step:
        name, ops = ins.name, ins.operands
        plain = self._computed(ins, run)
        data = self._data(ins)
        if name == "v_cndmask_b32" and data is None:
            return self._select_signed(ins, run)
        if data is None:
            return plain
        moved = self._moved(ins, run, data, 0)
        if name == "v_cndmask_b32":
            return self._select(ins, moved)

        def step(w: Waves) -> Any:
            control = [op for i, op in enumerate(ops) if i and i not in data]
            if any(self._unknown(w, op) for op in control):
                raise DataDependentError("how it moves data depends on data")
            return moved(w)

        if name not in {"v_or_b32", "v_lshl_or_b32"}:
            return step

        def union(w: Waves) -> Any:  # of halves apart: moved; else computed
            shift = 16 if name == "v_lshl_or_b32" else 0
            sides = []
            for i, by in ((data[0], shift), (data[1], 0)):
                x = broadcast(bits32(ops[i]))(w) << np.uint32(by)
                sides.append((x, self._zero_halves(w, ops[i], x, by)))
            apart = all((a | b)[w.mask].all() for a, b in zip(sides[0][1], sides[1][1], strict=True))
            return moved(w) if apart else plain(w)

        return union

    def _zero_halves(self, w: Waves, op: Operand, x: Array, by: int) -> list[Array]:
        """Whether each half of a value, shifted by 0 or 16, is known to be 0."""
        h = self.of(w)
        unknown = np.zeros((w.W, 64), np.uint32)
        if op.kind in {"v", "s"}:
            for plane in self._held(h, op)[0]:
                unknown = unknown | plane
        unknown = unknown << np.uint32(by)
        either = np.broadcast_to(x, (w.W, 64)) | unknown
        return [(either & np.uint32(0xFFFF)) == 0, (either >> np.uint32(16)) == 0]

    def _data(self, ins: Instruction) -> tuple[int, ...] | None:
        """Which operands it moves; None where it computes."""
        name, ops = ins.name, ins.operands
        if name in _MOVES and not any(ops[i].negate or ops[i].absolute for i in _MOVES[name]):
            return _MOVES[name]
        if any(m in ins.modifiers for m in ("clamp", "mul", "div")):
            return None
        if name in _SHIFTS and ops[1].kind == "k" and ops[1].value == 16:
            return (2,)
        if name == "v_and_b32":
            for mask, other in ((1, 2), (2, 1)):
                if ops[mask].kind == "k" and ops[mask].value & 0xFFFFFFFF in _HALVES:
                    return (other,)
        if name == "v_or_b32":
            return (1, 2)
        if name == "v_lshl_or_b32" and ops[2].kind == "k" and ops[2].value == 16:
            return (1, 3)
        if name == "v_alignbit_b32" and ops[3].kind == "k" and ops[3].value == 16:
            return (1, 2)
        if name == "v_bfi_b32" and ops[1].kind == "k" and ops[1].value & 0xFFFFFFFF in _HALVES:
            return (2, 3)
        return None

    def _select(self, ins: Instruction, moved: Step) -> Step:
        condition = ins.operands[3] if len(ins.operands) > 3 else Operand("s", VCC, 2)
        to = ins.operands[0]

        def step(w: Waves) -> Any:
            h = self.of(w)
            which = h.masks.get(condition.index) if condition.kind == "s" else None
            if which is None or not which[w.mask].any():
                return moved(w)
            no, yes = self.word(w, ins, 1), self.word(w, ins, 2)
            went = moved(w)
            chosen = np.where(yes == no, yes, e.expression("select", which, yes, no))
            self._put(w, to.index, chosen, (which != 0) & w.mask)
            return went

        return step

    def _select_signed(self, ins: Instruction, run: Step) -> Step:
        """A choice between floats of which one has a sign or bars."""
        condition = ins.operands[3] if len(ins.operands) > 3 else Operand("s", VCC, 2)
        to = ins.operands[0]

        def step(w: Waves) -> Any:
            no, yes = self.word(w, ins, 1), self.word(w, ins, 2)
            known = [self._known(w, ins, [i]) for i in (1, 2)]
            bit, which = self._lanes(w, condition)
            went, enable = run(w), self._written(w, ins)
            made, settled = np.where(bit, yes, no), np.where(bit, known[1], known[0])
            if which is not None:
                open_ = which[..., 0] != 0
                made = np.where(open_ & (yes != no), e.expression("select", which[..., 0], yes, no), made)
                settled = settled & ~(open_ & (yes != no))
            self.of(w).known(to.index, enable)
            self._put(w, to.index, made, enable & ~settled)
            return went

        return step

    def _put(self, w: Waves, register: int, hashes: Array, where: Array) -> None:
        """The hashes of whole registers in some lanes."""
        h = self.of(w)
        planes = to_planes(e.pieces(np.broadcast_to(hashes, (w.W, 64)), 2))
        h.put(register, np.where(where, planes, h.planes(register)))

    def _written(self, w: Waves, ins: Instruction) -> Array:
        """The lanes that a computing instruction writes."""
        if ins.encoding == "dpp":
            return w.mask & dpp(ins, lambda w: np.zeros((w.W, 64), np.uint32))(w)[1]
        return w.mask

    def _computed(self, ins: Instruction, run: Step) -> Step:
        """An operation on data: an expression of its operands."""
        name, ops = ins.name, ins.operands
        compares = name.startswith("v_cmp")
        flags = [op for op in ops[1:2] if op.kind == "s" and op.count == 2 and name.startswith(_WRITES_MASK)]
        sources = list(range(1 + len(flags), len(ops)))
        if name in _MULTIPLY_ADD:
            sources = list(_MULTIPLY_ADD[name])
        of = self._pair(ins) if name.startswith("v_pk_") else None

        def step(w: Waves) -> Any:
            h = self.of(w)
            unknown = any(self._unknown(w, ops[i], anywhere=ins.encoding == "dpp") for i in sources) or (
                name.startswith("v_div_fmas") and VCC in h.masks
            )
            if not unknown:
                went = run(w)
                self._forget(w, ins, compares=compares, flags=flags)
                if name in _APPROXIMATE:
                    self._put(w, ops[0].index, self._expression(ins, [self.word(w, ins, 1)]), self._written(w, ins))
                return went
            if compares:
                return self._compared(w, ins, run)
            if of is not None:
                made = of(w)
            elif any(ops[i].count > 1 and ops[i].kind != "k" for i in (0, *sources) if not (flags and i == 1)):
                raise NoCertificateError("64 bits are computed from data")
            else:
                words = [self.word(w, ins, i) for i in sources]
                if name.startswith("v_div_fmas") and VCC in h.masks:
                    words.append(h.masks[VCC])
                known = self._known(w, ins, sources)
                if name in {"v_cvt_u32_f32", "v_cvt_i32_f32"}:  # of constants: a step of an exact integer division
                    known = known | ~e.of_data(words[0])
                made = {ops[0].index: (self._expression(ins, words), known)}
            went = run(w)
            enable = self._written(w, ins)
            for register, (hashes, known) in made.items():
                h.known(register, enable)
                self._put(w, register, hashes, enable & ~known)
            for op in flags:
                h.masks[op.index] = np.where(w.mask & ~known, e.expression(f"{name} flag", hashes), U64(0))
            return went

        return step

    def _known(self, w: Waves, ins: Instruction, sources: list[int]) -> Array:
        """The lanes in which all operands are known; approximate functions have none."""
        h = self.of(w)
        unknown = np.zeros((w.W, 64), bool)
        if ins.name in _APPROXIMATE:
            return unknown
        for i in sources:
            op = ins.operands[i]
            if op.kind in {"v", "s"}:
                for planes in self._held(h, op):
                    there = np.broadcast_to(planes.any(axis=0), (w.W, 64))
                    if ins.encoding == "dpp" and i == 1:
                        there = dpp(ins, _constantly(there.astype(np.uint32)))(w)[0] != 0
                    unknown = unknown | there
        if ins.name.startswith("v_div_fmas") and VCC in h.masks:
            unknown = unknown | (h.masks[VCC] != 0)
        return ~unknown

    def _expression(self, ins: Instruction, x: list[Array]) -> Array:
        name, how = ins.name, ",".join(f"{k}:{v}" for k, v in sorted(ins.modifiers.items()) if k in _CHANGES)
        if name == "v_subrev_f32":
            x, name = x[::-1], "v_sub_f32"
        if name in _MULTIPLY_ADD:
            name = "v_fma_f32"
        if name in {"v_max_f32", "v_max3_f32"} and not how:
            made = x[0]
            for other in x[1:]:
                made = e.maximum(made, other)
            return made
        if name == "v_div_fixup_f32" and self._level == "order":
            return e.expression("div.f32", x[2], x[1])
        if name in _FLOATS and not how:
            called, kind = _FLOATS[name]
            if name in _APPROXIMATE and self._level == "bits":
                called = name
            return float_expression(called, kind, x)
        return e.expression(f"{name} {how}", *x)

    def _pair(self, ins: Instruction) -> Callable[[Waves], dict[int, tuple[Array, Array]]]:
        """Of v_pk_..._f32: hashes of both results by register, and where they are known."""
        n = len(ins.operands) - 1
        low, high = ins.bits("op_sel", n, 0), ins.bits("op_sel_hi", n, 1)
        signs = ins.bits("neg_lo", n, 0), ins.bits("neg_hi", n, 0)
        if ins.name not in _FLOATS:
            return _unmodeled

        def made(w: Waves) -> dict[int, tuple[Array, Array]]:
            h = self.of(w)
            out = {}
            for half, (chosen, negate) in enumerate(((low, signs[0]), (high, signs[1]))):
                words, unknown = [], np.zeros((w.W, 64), bool)
                for i in range(n):
                    op = ins.operands[1 + i]
                    part = chosen[i] if op.count > 1 else 0
                    x = self.word(w, ins, 1 + i, part)
                    words.append(e.negated(x) if negate[i] else x)
                    if op.kind in {"v", "s"}:
                        one = replace(op, index=op.index + part, count=1)
                        unknown = unknown | self._held(h, one)[0].any(axis=0)
                called, kind = _FLOATS[ins.name]
                out[ins.operands[0].index + half] = (float_expression(called, kind, words), ~unknown)
            return out

        return made

    def _compared(self, w: Waves, ins: Instruction, run: Step) -> Any:
        found = re.fullmatch(r"v_cmp_(\w+)_(\w+)", ins.name)
        h, to = self.of(w), ins.operands[0]
        if found is None or any(op.count > 1 and op.kind != "k" for op in ins.operands[1:]):
            raise NoCertificateError("this comparison of data is not modeled")
        a, b = (self.word(w, ins, i) for i in (1, 2))
        if found[2] == "f32" and found[1] in _TESTS:
            test, exchanged, either = _TESTS[found[1]]
            operate = e.commutative if either else e.expression
            made = operate(f"setp.{test}.f32", *((b, a) if exchanged else (a, b)))
        else:
            made = e.expression(ins.name, a, b)
        known = self._known(w, ins, [1, 2])
        went = run(w)
        _forget(h, to)
        h.masks[to.index] = np.where(w.mask & ~known, made, U64(0))
        return went

    def _forget(self, w: Waves, ins: Instruction, *, compares: bool, flags: list[Operand]) -> None:
        """What an instruction on known bits wrote is known."""
        h = self.of(w)
        for op in (*ins.operands[:1], *flags):
            if op.kind == "s":
                h.scalar[:, w.live[:, 0], op.index : op.index + op.count] = 0
                _forget(h, op)
            elif op.kind == "v" and not compares:
                for r in range(op.count):
                    h.known(op.index + r, w.mask)


_WRITES_MASK: Final = (
    "v_div_scale",
    "v_add_co",
    "v_sub_co",
    "v_subrev_co",
    "v_addc",
    "v_subb",
    "v_mad_u64",
    "v_mad_i64",
)
_CHANGES: Final = {"clamp", "mul", "div", "op_sel", "op_sel_hi", "neg_lo", "neg_hi", "dst_sel"}


def _unmodeled(w: Waves) -> dict[int, tuple[Array, Array]]:
    raise NoCertificateError("this packed instruction is not modeled")


def _forget(h: Hashes, op: Operand) -> None:
    """A scalar register was written: what lanes' hashes it held are gone."""
    for i in range(op.index - 1, op.index + op.count):
        h.masks.pop(i, None)


def _inverted(a: Value) -> Value:
    if a.hashes is None:
        return Value(~a.bits)
    return Value(~a.bits, np.where(a.hashes != 0, e.expression("not.pred", a.hashes), U64(0)))


def _constantly(x: Array) -> Callable[[Waves], Array]:
    return lambda _: x


def _register(kind: str, first: int, count: int) -> str:
    return f"{kind}{first}" if count == 1 else f"{kind}[{first}:{first + count - 1}]"
