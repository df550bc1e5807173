"""Hashes of expressions: what a value was computed from, by which operations, in which order.

A value of 16 n bits has n pieces, each with a hash of 64 bits; 0 says that the bits are known: a constant, an address,
an index. Pieces of one result are its hash plus their number, so that a float which is stored and loaded, moved between
threads, or packed beside another is recognized. Equal hashes mean equal operations on equal operands in one order; of
a + b, a * b and max(a, b) the order of the two does not count, and signs are taken out of products, as in IEEE 754
arithmetic neither changes a bit (but for the sign and the payload of a NaN).

A maximum is that of a set: max(max(a, b), c) = max(a, max(b, c)), and -inf adds nothing to it.

    hash   bits 7..63 mixed · bit 6 a maximum · bit 5 set · bit 4 depends on data · bit 3 the sign · bits 0..2 the piece

An expression of known bits alone, such as the exponential of a constant, that hardware rounds as it likes is one that
does not depend on data.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
U64: Final = np.uint64
_SIGN: Final = U64(8)
_CORE: Final = U64(0xFFFFFFFFFFFFFF80)
_MAXIMUM: Final = U64(64)
_SOME: Final = U64(32)
_DATA: Final = U64(16)
# Odd factors of the operands of an operation, drawn once.
_FACTORS: Final = tuple(
    U64(int.from_bytes(hashlib.blake2b(b"operand %d" % i, digest_size=8).digest(), "little") | 1) for i in range(64)
)


def mixed(x: Array) -> Array:
    """A hash of 64-bit numbers (the finalizer of SplitMix64: Steele et al., 2014)."""
    with np.errstate(over="ignore"):  # 64 bits are what is wanted
        x = x ^ (x >> U64(30))
        x *= U64(0xBF58476D1CE4E5B9)
        x ^= x >> U64(27)
        x *= U64(0x94D049BB133111EB)
        x ^= x >> U64(31)
    return x


@cache
def seed(name: str) -> np.uint64:
    """The hash of an operation's name."""
    return U64(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def expression(name: str, *operands: Array) -> Array:
    """The hash of an operation on operands, in their order."""
    total: Any = seed(name)
    data: Any = U64(0)
    with np.errstate(over="ignore"):
        for operand, factor in zip(operands, _FACTORS, strict=False):
            total = total + operand * factor
            data = data | operand
    made: Array = (mixed(np.asarray(total)) & _CORE) | _SOME | (data & _DATA)
    return made


def commutative(name: str, a: Array, b: Array, *rest: Array) -> Array:
    """The hash of an operation whose first two operands may be exchanged."""
    return expression(name, np.minimum(a, b), np.maximum(a, b), *rest)


def maximum(a: Array, b: Array) -> Array:
    """max(a, b) of float32: the set of what it is of has a sum of hashes, in whatever order it was made."""
    nothing = constant(np.asarray(0xFF800000), 32)  # -inf

    def total(x: Array) -> Array:
        return np.where((x & (_MAXIMUM | _SIGN)) == _MAXIMUM, x, mixed(x ^ seed("max.f32"))) & _CORE

    with np.errstate(over="ignore"):
        made = ((total(a) + total(b)) & _CORE) | _MAXIMUM | _SOME | ((a | b) & _DATA)
    found: Array = np.where((a == b) | (b == nothing), a, np.where(a == nothing, b, made))
    return found


def row(name: str, elements: Array) -> Array:
    """The hash of the last axis, in its order: a fragment of a matrix."""
    factors = mixed(np.arange(1, elements.shape[-1] + 1, dtype=U64)) | U64(1)
    total = seed(name) + (mixed(elements) * factors).sum(axis=-1, dtype=U64)
    made: Array = (mixed(total) & _CORE) | _SOME | (np.bitwise_or.reduce(elements, axis=-1) & _DATA)
    return made


def of_data(hashes: Array) -> Array:
    """Whether expressions depend on data."""
    found: Array = (hashes & _DATA) != 0
    return found


def negated(x: Array) -> Array:
    """-x."""
    return x ^ _SIGN


def product_sign(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Two factors without their signs, and the sign of their product."""
    return a & ~_SIGN, b & ~_SIGN, (a ^ b) & _SIGN


def constant(bits: Array, width: int) -> Array:
    """The hash of so many known bits, the highest apart: of a float it is the sign."""
    bits = np.asarray(bits, U64)
    top = U64(width - 1)
    made: Array = expression(f"constant {width}", mixed(bits & ~(U64(1) << top)) & ~_DATA) | ((bits >> top) << U64(3))
    return made


def whole(pieces: Array) -> Array:
    """The hash of all pieces [T, n] together: of the result that they are pieces of, or of their packing."""
    first = pieces[..., 0]
    n = pieces.shape[-1]
    if n == 1:
        return first
    one = (first & U64(7)) == 0
    for i in range(1, n):
        one &= pieces[..., i] == first + U64(i)
    one &= first != 0
    if one.all():
        return first
    return np.where(one, first, expression(f"packed {n}", *(pieces[..., i] for i in range(n))))


def pieces(hashes: Array, n: int) -> Array:
    """The n pieces [T, n] of results."""
    return hashes[..., None] + np.arange(n, dtype=U64)


def leaf(name: str, index: Array, n: int) -> Array:
    """The pieces [..., n] of elements of an argument, at known places."""
    return pieces(expression(f"argument {name}", mixed(np.asarray(index, U64))) | _DATA, n)


def short(hashes: Array) -> str:
    """Twelve hexadecimal digits for any number of hashes, in their order."""
    return hashlib.sha256(np.ascontiguousarray(hashes, U64).tobytes()).hexdigest()[:12]
