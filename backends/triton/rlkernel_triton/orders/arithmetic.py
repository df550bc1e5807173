"""Instructions of PTX that compute: integers, floats, comparisons, conversions, choices (PTX ISA, chapter 9.7).

Integers of known bits are computed. A float operation on data is an expression of its operands; on known bits alone it
is computed where IEEE 754 leaves no choice (add, mul, fma, neg), else it is an expression too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from rlkernel_triton.orders import expressions as e
from rlkernel_triton.orders.errors import UnknownPtxError
from rlkernel_triton.orders.expressions import U64, Array
from rlkernel_triton.orders.machine import KINDS, Machine, Step, Value, both, known, selected
from rlkernel_triton.orders.ptx import Instruction

_INT: Final[dict[str, Any]] = {
    f"{letter}{8 * size}": np.dtype(f"{'i' if letter == 's' else 'u'}{size}").type
    for letter in "usb"
    for size in (1, 2, 4, 8)
}
_WIDTH: Final = {
    **{k: np.dtype(v).itemsize * 8 for k, v in _INT.items()},
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "bf16x2": 32,
    "f16x2": 32,
    "pred": 1,
}
F32: Final = np.float32


def width_of(kind: str) -> int:
    """Bits of a type.

    Raises:
        UnknownPtxError: it is none that is modeled.
    """
    if kind not in _WIDTH:
        raise UnknownPtxError(f"the type .{kind} is not modeled")
    found: int = _WIDTH[kind]
    return found


def floats(bits: Any, kind: str) -> Any:
    """Bits as floats of a type; those of 16 bits as float32."""
    bits = np.asarray(bits)
    if kind == "f32":
        return bits.view(np.float32)
    if kind == "f64":
        return bits.view(np.float64)
    if kind == "f16":
        return bits.view(np.float16).astype(F32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(F32)


def as_bits(x: Any, kind: str) -> Any:
    """Floats as the bits of a type, rounded to the nearest, ties to even."""
    x = np.asarray(x)
    if kind == "f32":
        return x.astype(F32).view(np.uint32)
    if kind == "f64":
        return x.astype(np.float64).view(np.uint64)
    if kind == "f16":
        return x.astype(np.float16).view(np.uint16)
    word = x.astype(F32).view(np.uint32)
    rounded = (word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def hash_of(value: Value, kind: str) -> Array:
    """The hash of an operand: of its expression, or of its bits where they are known."""
    own = e.constant(np.asarray(value.bits), width_of(kind))
    if value.hashes is None:
        return own
    named = e.whole(value.hashes) if value.hashes.shape[-1] > 1 else value.hashes[..., 0]
    return np.where((value.hashes != 0).any(axis=-1), named, own)


def anywhere(values: tuple[Value, ...]) -> Array | None:
    """The lanes in which some bit is not known; None where all are."""
    found = [(v.hashes != 0).any(axis=-1) for v in values if v.hashes is not None]
    if not found:
        return None
    lanes: Array = np.logical_or.reduce(np.broadcast_arrays(*found))
    return lanes if lanes.any() else None


def result(bits: Any, hashes: Array, where: Array | None, width: int) -> Value:
    """A result whose bits are not known in some lanes; None: in all."""
    shape = np.broadcast_shapes(np.shape(bits), np.shape(hashes))
    pieces = e.pieces(np.broadcast_to(hashes, shape), max(1, width // 16))
    return Value(bits, pieces if where is None else np.where(np.broadcast_to(where, shape)[..., None], pieces, U64(0)))


def named(ins: Instruction, level: str) -> str:
    """An operation's name: "bits" keeps what decides its bits, "order" the operation alone, whoever's it is."""
    parts = [p for p in ins.parts if p not in {"rn", "approx", "full", "ftz", "rz"}] if level == "order" else ins.parts
    name = {"ex2": "exp2", "lg2": "log2"}.get(ins.name, ins.name)
    return ".".join((name, *(p for p in parts if not (p == "rn" and (ins.name in _EXACT or ins.name == "fma")))))


# Rounded to nearest unless something else is said.
_EXACT: Final[Mapping[str, Callable[..., Any]]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply,
    "max": np.fmax, "min": np.fmin, "neg": np.negative, "abs": np.abs,
}  # fmt: skip


def _fma(a: Any, b: Any, c: Any) -> Any:
    if np.asarray(a).dtype == F32:
        return (np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64)).astype(F32)
    return a * b + c


_APPROXIMATE: Final[Mapping[str, Callable[..., Any]]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x),
    "div": np.divide, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


def float_operation(ins: Instruction, level: str) -> Step | None:
    """add, sub, mul, fma, max, min, neg, abs, and functions; None for another."""
    kind, name = ins.kind, ins.name
    if kind not in {"f32", "f64", "f16", "bf16"} or "sat" in ins.parts:
        return None
    exact = name in _EXACT or name == "fma" or (name in {"div", "sqrt", "rcp"} and "rn" in ins.parts)
    compute = _EXACT.get(name) or _APPROXIMATE.get(name) or (_fma if name == "fma" else None)
    if compute is None:
        return None
    width, to, called = width_of(kind), ins.operands[0], named(ins, level)
    wide = np.float64 if name in _APPROXIMATE else None

    def step(m: Machine) -> None:
        values = tuple(m.read(op, width) for op in ins.operands[1:])
        numbers = [floats(v.bits, kind) for v in values]
        if wide:
            numbers = [x.astype(wide) for x in numbers]
        bits = as_bits(compute(*numbers), kind)
        where = anywhere(values)
        if exact and where is None:
            m.write(to, Value(bits), m.active(ins))
            return
        hashes = float_expression(called, name, [hash_of(v, kind) for v in values])
        m.write(to, result(bits, hashes, where if exact else None, width), m.active(ins))

    return step


def float_expression(called: str, name: str, x: list[Array]) -> Array:
    """The hash of a float operation: signs out of products, sums and products in either order, a - b as a + -b."""
    if name == "neg":
        return e.negated(x[0])
    if name == "abs":
        return e.expression(called, x[0] & ~U64(8))
    if name == "mul":
        a, b, sign = e.product_sign(*x)
        return e.commutative(called, a, b) ^ sign
    if name == "fma":
        a, b, sign = e.product_sign(x[0], x[1])
        return e.commutative(called, a, b, x[2], sign)
    if name == "sub":
        return e.commutative(called.replace("sub", "add", 1), x[0], e.negated(x[1]))
    if called == "max.f32":
        return e.maximum(x[0], x[1])
    if name in {"add", "max", "min"}:
        return e.commutative(called, x[0], x[1])
    return e.expression(called, *x)


def _wide_product(a: Any, b: Any) -> Any:
    kind = {np.dtype(np.int32): np.int64, np.dtype(np.uint32): np.uint64, np.dtype(np.int16): np.int32,
            np.dtype(np.uint16): np.uint32}[a.dtype]  # fmt: skip
    return a.astype(kind) * b.astype(kind)


def _high(a: Any, b: Any) -> Any:
    if a.dtype.itemsize > 4:
        raise UnknownPtxError("the high half of a product of 64 bits is not modeled")
    return (_wide_product(a, b) >> (8 * a.dtype.itemsize)).astype(a.dtype)


def _shift(a: Any, b: Any, left: bool) -> Any:
    width = a.dtype.itemsize * 8
    by = np.minimum(b, width - 1).astype(a.dtype)
    if left:
        return np.where(b < width, a << by, np.zeros((), a.dtype))
    moved = a >> by
    return moved if a.dtype.kind == "i" else np.where(b < width, moved, np.zeros((), a.dtype))


def _field(a: Any, start: Any, length: Any) -> Any:
    width = a.dtype.itemsize * 8
    s, n = (np.asarray(x, np.int64) & 0xFF for x in (start, length))
    raw = np.asarray(a).astype(np.int64) & ((1 << width) - 1)
    found = np.where(s < width, raw >> np.minimum(s, 63), 0) & ((1 << n) - 1)
    if a.dtype.kind == "i":
        top = (raw >> np.minimum(s + n - 1, width - 1)) & 1
        found = np.where((n > 0) & (top == 1), found | ~((1 << n) - 1), found)
    return found.astype(a.dtype)


def _divided(a: Any, b: Any, rest: bool) -> Any:
    x, y = np.asarray(a).astype(object if a.dtype.itemsize == 8 else np.int64), np.asarray(b).astype(np.int64)
    x = x.astype(np.int64) if a.dtype.kind == "i" or a.dtype.itemsize < 8 else np.asarray(a)
    safe = np.where(y == 0, 1, y)
    quotient = np.abs(x) // np.abs(safe) * (np.sign(x) * np.sign(safe)) if a.dtype.kind == "i" else x // safe
    return ((x - quotient * safe) if rest else quotient).astype(a.dtype)


_INTEGER: Final[Mapping[str, Callable[..., Any]]] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative, "abs": np.abs,
    "shl": lambda a, b: _shift(a, b, True), "shr": lambda a, b: _shift(a, b, False), "bfe": _field,
    "div": lambda a, b: _divided(a, b, False), "rem": lambda a, b: _divided(a, b, True),
    "popc": lambda a: np.array([int(x).bit_count() for x in np.ravel(a)], np.uint32).reshape(np.shape(a)),
}  # fmt: skip


def integer_operation(ins: Instruction, level: str) -> Step | None:
    """Arithmetic of integers; None for another instruction."""
    kind, name = ins.kind, ins.name
    if kind not in _INT or (name not in _INTEGER and name not in {"mul", "mad"}):
        return None
    width, number, called = width_of(kind), _INT[kind], named(ins, level)
    out = 2 * width if "wide" in ins.parts else width
    narrow = {1} if name in {"shl", "shr"} else {1, 2} if name == "bfe" else set()
    to = ins.operands[0]

    def compute(x: list[Any]) -> Any:
        if name not in {"mul", "mad"}:
            return _INTEGER[name](*x)
        how = next(p for p in ins.parts if p in {"lo", "hi", "wide"})
        products: dict[str, Callable[..., Any]] = {"lo": np.multiply, "hi": _high, "wide": _wide_product}
        product = products[how](x[0], x[1])
        return product if name == "mul" else product + x[2]

    def step(m: Machine) -> None:
        values = []
        for i, op in enumerate(ins.operands[1:]):
            values.append(m.read(op, 32 if i in narrow else out if name == "mad" and i == 2 else width))
        moved = _moved(ins, values, width)
        if moved is not None:
            m.write(to, moved, m.active(ins))
            return
        x = [np.asarray(v.bits) for v in values]
        for i in {*range(len(x))} - narrow:
            x[i] = x[i].view(_INT[f"{kind[0]}{out}"] if name == "mad" and i == 2 else number)
        bits = np.asarray(compute(x))
        bits = bits.view(KINDS[out]) if bits.dtype != KINDS[out] else bits
        where = anywhere(tuple(values))
        if where is None:
            m.write(to, Value(bits), m.active(ins))
            return
        hashes = [hash_of(v, f"u{8 * np.asarray(v.bits).dtype.itemsize}") for v in values]
        if name in {"add", "and", "or", "xor", "min", "max", "mul", "mad"}:
            made = e.commutative(called, *hashes)
        else:
            made = e.expression(called, *hashes)
        m.write(to, result(bits, made, where, out), m.active(ins))

    return step


def _moved(ins: Instruction, values: list[Value], width: int) -> Value | None:
    """Shifts by whole pieces, masks of whole pieces and unions of pieces apart: they move data and compute nothing."""
    name = ins.name
    if name not in {"shl", "shr", "and", "or"} or known(values) or ins.kind.startswith("s"):
        return None
    a, b = values
    n = width // 16
    if name in {"shl", "shr"}:
        if b.hashes is not None or np.ndim(b.bits) or int(b.bits) % 16 or a.hashes is None:
            return None
        k = int(b.bits) // 16
        hashes = np.zeros_like(a.hashes)
        if name == "shl":
            hashes[..., k:] = a.hashes[..., : n - k]
            return Value(_shift(np.asarray(a.bits), b.bits, True), hashes)
        hashes[..., : n - k] = a.hashes[..., k:]
        return Value(_shift(np.asarray(a.bits), b.bits, False), hashes)
    if name == "and":
        if a.hashes is None:
            a, b = b, a
        if a.hashes is None or b.hashes is not None or np.ndim(b.bits):
            return None
        parts = [(int(b.bits) >> (16 * i)) & 0xFFFF for i in range(n)]
        if not set(parts) <= {0, 0xFFFF}:
            return None
        keep = np.array([p == 0xFFFF for p in parts])
        return Value(a.bits & b.bits, np.where(keep, a.hashes, U64(0)))
    # "or": each piece known to be 0 on one side
    none = np.zeros((*np.broadcast_shapes(np.shape(a.bits), np.shape(b.bits)), n), U64)
    x, y = (none if v.hashes is None else v.hashes for v in (a, b))
    shift = (np.arange(n) * 16).astype(np.asarray(a.bits).dtype)
    zero = [((np.asarray(v.bits)[..., None] >> shift) & np.asarray(a.bits).dtype.type(0xFFFF)) == 0 for v in (a, b)]
    apart = ((x == 0) & zero[0]) | ((y == 0) & zero[1]) | ((x == 0) & (y == 0))
    return Value(a.bits | b.bits, x | y) if apart.all() else None


_TESTS: Final[Mapping[str, Callable[..., Any]]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def comparison(ins: Instruction, level: str) -> Step:
    """setp."""
    test, kind = ins.parts[0], ins.kind
    joined = ins.parts[1] if ins.parts[1] in {"and", "or", "xor"} else ""
    floating = kind in {"f32", "f64", "f16", "bf16"}
    base = test.removesuffix("u") if floating and test not in {"nan", "num"} else test
    if (base not in _TESTS and base not in {"nan", "num"}) or (kind not in _INT and not floating):
        raise UnknownPtxError("this comparison is not modeled")
    width, to = width_of(kind), ins.operands[0]
    unordered = floating and base != test

    def step(m: Machine) -> None:
        a, b = (m.read(op, width) for op in ins.operands[1:3])
        if floating:
            x, y = floats(a.bits, kind), floats(b.bits, kind)
            lost = np.isnan(x) | np.isnan(y)
            if base in {"nan", "num"}:
                bits = lost if base == "nan" else ~lost
            else:
                bits = _TESTS[base](x, y)
                bits = bits | lost if unordered else bits & ~lost
        else:
            x, y = (np.asarray(v.bits).view(_INT[kind]) for v in (a, b))
            bits = _TESTS[base](x, y)
        where, found = anywhere((a, b)), Value(bits)
        if where is not None:
            h = [hash_of(v, kind) for v in (a, b)]
            if base in {"gt", "ge"}:
                made = e.expression(f"setp.{test.replace('g', 'l')}.{kind}", h[1], h[0])
            elif base in {"lt", "le"} or (base in _TESTS and base not in {"eq", "ne"}):
                made = e.expression(f"setp.{test}.{kind}", *h)
            else:
                made = e.commutative(f"setp.{test}.{kind}", *h)
            found = result(bits, made, where, 1)
        if joined:
            found = both(joined, found, m.read(ins.operands[3], 1))
        m.write(to, found, m.active(ins))

    return step


def choice(ins: Instruction, level: str) -> Step:
    """selp."""
    kind = ins.kind
    width = width_of(kind)

    def step(m: Machine) -> None:
        a, b = (m.read(op, width) for op in ins.operands[1:3])
        condition = m.read(ins.operands[3], 1)
        n = max(1, width // 16)
        m.write(ins.operands[0], selected(condition, a, b, lambda v: hash_of(v, kind), n), m.active(ins))

    return step


def predicate_logic(ins: Instruction, level: str) -> Step:
    """and, or, xor and not of predicates."""

    def step(m: Machine) -> None:
        values = [m.read(op, 1) for op in ins.operands[1:]]
        if ins.name == "not":
            (a,) = values
            hashes = None if a.hashes is None else np.where(a.hashes != 0, e.expression("not.pred", a.hashes), U64(0))
            m.write(ins.operands[0], Value(np.logical_not(a.bits), hashes), m.active(ins))
        else:
            m.write(ins.operands[0], both(ins.name, *values), m.active(ins))

    return step


def conversion(ins: Instruction, level: str) -> Step:
    """cvt."""
    to, source = ins.parts[-2:]
    modes = ins.parts[:-2]
    if to in {"bf16x2", "f16x2"}:
        return _to_pair(ins, to.removesuffix("x2"), modes, level)
    called = f"cvt.{'.'.join(modes)}.{to}.{source}" if level == "bits" else f"cvt.{to}.{source}"
    width, out = width_of(source), width_of(to)
    exact_up = (source, to) == ("bf16", "f32")

    def step(m: Machine) -> None:
        a = m.read(ins.operands[1], m.kernel.widths.get(ins.operands[1].name, width))
        held = m.kernel.widths[ins.operands[0].name]
        raw = np.asarray(a.bits)
        if to in _INT and source in _INT:
            narrow = raw.astype(KINDS[max(16, width)]).astype(np.dtype(f"u{width // 8}")).view(_INT[source])
            bits = narrow.astype(_INT[to]).astype(np.dtype(f"i{held // 8}" if to[0] == "s" else f"u{held // 8}"))
            bits = bits.view(KINDS[held])
        elif to in _INT:
            x = floats(raw, source).astype(np.float64)
            rounded = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}.get(modes[0] if modes else "")
            if rounded is None:
                raise UnknownPtxError("this conversion is not modeled")
            limit = np.iinfo(_INT[to])
            bits = np.clip(np.nan_to_num(rounded(x)), limit.min, limit.max).astype(_INT[to]).view(KINDS[out])
        elif source in _INT:
            bits = as_bits(raw.view(_INT[source]).astype(np.float64), to)
        else:
            bits = as_bits(floats(raw, source), to)
        if a.hashes is None:
            m.write(ins.operands[0], Value(bits), m.active(ins))
            return
        if exact_up:
            hashes = np.concatenate([np.zeros_like(a.hashes), a.hashes], axis=-1)
        elif to in _INT and source in _INT and source[0] != "s":
            n, have = held // 16, width // 16
            hashes = np.zeros((*a.hashes.shape[:-1], n), U64)
            keep = min(n, have, out // 16)
            hashes[..., :keep] = a.hashes[..., :keep]
        else:
            where = anywhere((a,))
            if where is not None and to in _INT:  # of constants: a step of an integer division, which is exact
                where = where & e.of_data(hash_of(a, source))
            made = e.expression(called, hash_of(a, source))
            m.write(ins.operands[0], result(bits, made, where, held), m.active(ins))
            return
        m.write(ins.operands[0], Value(bits, hashes), m.active(ins))

    return step


def _to_pair(ins: Instruction, kind: str, modes: tuple[str, ...], level: str) -> Step:
    called = f"cvt.{'.'.join(modes)}.{kind}.f32" if level == "bits" else f"cvt.{kind}.f32"

    def step(m: Machine) -> None:
        high, low = (m.read(op, 32) for op in ins.operands[1:3])
        halves = [as_bits(floats(v.bits, "f32"), kind).astype(np.uint32) for v in (low, high)]
        bits = halves[0] | halves[1] << np.uint32(16)
        if known((low, high)):
            m.write(ins.operands[0], Value(bits), m.active(ins))
            return
        hashes = np.zeros((*np.shape(bits), 2), U64)
        for i, v in enumerate((low, high)):
            where = anywhere((v,))
            if where is not None:
                hashes[..., i] = np.where(where, e.expression(called, hash_of(v, "f32")), U64(0))
        m.write(ins.operands[0], Value(bits, hashes), m.active(ins))

    return step
