"""Matrix instructions of CDNA as expressions: an accumulator, a row of A and a column of B, in the order of k.

The layout is that of `cdna_simulator.matrix`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from cdna_simulator.assembly import Instruction, Operand
from cdna_simulator.operands import Step, bits32
from cdna_simulator.waves import LANES, Waves
from rlkernel_rocm.simulated.order_memory import Hashes, to_planes, word
from rlkernel_triton.orders import expressions as e
from rlkernel_triton.orders.errors import NoCertificateError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.matrix import ORDER, product


def matrix(ins: Instruction, run: Step, level: str, hashes: Callable[[Waves], Hashes]) -> Step | None:
    """The function that executes a matrix instruction; None for any other."""
    if not ins.name.startswith("v_mfma"):
        return None
    found = re.fullmatch(r"v_mfma_f32_(16|32)x\1x(\d+)_?(f32|f16|bf16)(_1k)?", ins.name)
    if found is None:
        raise NoCertificateError("this matrix instruction is not modeled")
    M, K, kind = int(found[1]), int(found[2]), found[3]
    to, a, b, c = ins.operands[:4]
    groups, name = 64 // M, ins.name if level == "bits" else f"{ORDER} k{K}"
    register = np.arange(M * M // 64)[:, None]
    if M == 16:
        rows, columns = 4 * (LANES // 16) + register, LANES % 16
    else:
        rows, columns = 8 * (register // 4) + 4 * (LANES // 32) + register % 4, LANES % 32
    columns = np.broadcast_to(columns, rows.shape)

    def operand(w: Waves, op: Operand) -> Array:
        """[W, M, K]."""
        parts: list[Array] = []
        for r in range(op.count):
            held = hashes(w).pieces("v", op.index + r)
            value = w.v[op.index + r]
            if kind == "f32":
                parts.append(word(held, value))
                continue
            for j in range(2):
                half = (value >> np.uint32(16 * j)) & np.uint32(0xFFFF)
                parts.append(np.where(held[..., j] != 0, held[..., j], e.constant(half, 16)))
        x = np.stack(parts, axis=-1).reshape(w.W, groups, M, K // groups)
        return x.transpose(0, 2, 1, 3).reshape(w.W, M, K)

    def step(w: Waves) -> Any:
        h = hashes(w)
        acc = np.zeros((w.W, M, M), U64)
        for r in range(len(register)):
            if c.kind == "v":
                acc[:, rows[r], columns[r]] = word(h.pieces("v", c.index + r), w.v[c.index + r])
            else:
                acc[:, rows[r], columns[r]] = e.constant(np.broadcast_to(bits32(c)(w), (w.W, 64)), 32)
        made = product(name, acc, operand(w, a), operand(w, b))
        went = run(w)
        for r in range(len(register)):
            planes = to_planes(e.pieces(made[:, rows[r], columns[r]], 2))
            h.put(to.index + r, np.where(w.live, planes, h.planes(to.index + r)))
        return went

    return step
