"""Certificates: hashes of the orders of an operator's sums at a size, on an architecture, and which are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlkernel_conformance.orders.calls import Probe, numbers, probe
from rlkernel_core.errors import ConfigError, RLKernelError, UnknownNameError
from rlkernel_core.spec import OPERATORS

Hashes = npt.NDArray[np.uint64]
LEVELS: Final = ("bits", "order")
DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# (backend, beginning of an architecture) -> "module:function" of the architecture, the level and the operator, which
# returns a `Reader`.
READERS: Final[Mapping[tuple[str, str], str]] = {
    ("triton", "sm"): "rlkernel_triton.orders.readers:nvidia",
    ("triton", "gfx9"): "rlkernel_rocm.simulated.orders:amd",
}


class Reader(Protocol):
    """What derives the orders of one call."""

    def name(self, x: Tensor, hashes: Hashes) -> None:
        """Give the elements of a float tensor hashes, [..., pieces of 16 bits]."""

    def leaf(self, name: str, index: Hashes, pieces: int) -> Hashes:
        """Hashes of the elements of an argument at some places, [..., pieces]."""

    def run(self, call: Any) -> Any:
        """The operator's result."""

    def hashes(self, x: Tensor) -> Hashes:
        """Hashes of the elements of a result, [..., pieces]; 0 where bits are known."""

    @property
    def fusable(self) -> Mapping[str, int]:
        """Of each kernel: additions that a later compiler may fuse with a product."""


@dataclass(frozen=True)
class Certificate:
    """The order of an operator's sums at one size; or why there is none."""

    backend: str
    op: str
    arch: str
    level: str
    dtype: str
    size: str
    hash: str = ""  # of all outputs; "" where there is no certificate
    outputs: Mapping[str, str] | None = None  # result -> hash, of a row where there are rows
    rows_alike: bool | None = None  # whether the first and the last row have one hash; None: results have no rows
    fusable: Mapping[str, int] | None = None  # kernel -> additions that ptxas may fuse with a product, where any
    why: str = ""  # there is none

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {k: v for k, v in asdict(self).items() if v not in (None, "", {})}


def reader(backend: str, arch: str, level: str, op: str) -> Reader:
    """What derives the orders of a call of a backend's operator on an architecture.

    Raises:
        UnknownNameError: there is no such level, or nobody reads the backend's code for such an architecture.
        ConfigError: what does is not installed.
    """
    if level not in LEVELS:
        raise UnknownNameError("level", level, LEVELS)
    found = [target for (name, kind), target in READERS.items() if name == backend and arch.startswith(kind)]
    if not found:
        known = [f"{name} on {kind}…" for name, kind in READERS]
        raise UnknownNameError("backend and architecture with certificates", f"{backend} on {arch}", known)
    module, _, name = found[0].partition(":")
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise ConfigError(f"certificates of {backend} on {arch} need the package {package.replace('_', '-')}")
    made: Reader = getattr(import_module(module), name)(arch, level, op)
    return made


def certificate(
    op: str, size: str, *, backend: str = "triton", arch: str = "sm90", level: str = "bits", dtype: str = "bfloat16",
    gradient: bool = False,
) -> Certificate:  # fmt: skip
    """Derive the order of an operator's sums at a size.

    Args:
        op: operator.
        size: in the operator's form, such as "8x50257" (`calls.PROBES`).
        backend: whose kernels.
        arch: which they are compiled for: "sm90", "gfx942".
        level: "bits": equal hashes promise equal bits on one architecture; "order": the order alone, comparable across
            architectures.
        dtype: of the operator's primary tensors.
        gradient: whether the gradients are outputs too.

    Raises:
        UnknownNameError: there is no such operator, level, dtype, or reader.
        ArgumentError: the size has not the operator's form.
    """
    asked, shape = probe(op), numbers(op, size)
    if dtype not in DTYPES:
        raise UnknownNameError("dtype", dtype, DTYPES)
    about: dict[str, Any] = {"backend": backend, "op": op, "arch": arch, "level": level, "dtype": dtype, "size": size}
    last = shape[0] - 1 if asked.rows else 0
    found = []
    for row in sorted({0, last}):
        source = reader(backend, arch, level, op)
        try:
            found.append(_outputs(source, asked, op, shape, DTYPES[dtype], row, gradient=gradient))
        except RLKernelError as error:
            if type(error).__module__.startswith("rlkernel_core"):
                raise
            return Certificate(**about, why=str(error))
    outputs = found[0]
    total = sha256("".join(f"{k}={v};" for k, v in outputs.items()).encode()).hexdigest()[:12]
    some = {k: n for k, n in source.fusable.items() if n}
    of_rows = [name for name in outputs if name.removeprefix("d_") in {*asked.rows, *asked.outputs}]
    alike = all(f[name] == outputs[name] for f in found for name in of_rows) if asked.rows else None
    return Certificate(**about, hash=total, outputs=outputs, rows_alike=alike, fusable=some)


def _outputs(
    source: Reader, asked: Probe, op: str, shape: tuple[int, ...], dtype: torch.dtype, row: int, *, gradient: bool
) -> dict[str, str]:
    """Hashes of the outputs: of one row, or of all of them where they have none."""
    given = asked.arguments(shape, dtype, torch.Generator().manual_seed(0))
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            source.name(x, _names(source, name, x, asked.rows.get(name, 0), row))
    if gradient:
        for name in asked.gradients:
            given[name].requires_grad_()
    result = source.run(OPERATORS[op].call(**given))
    made: dict[str, Tensor] = {name: _of(result, name).detach() for name in asked.outputs}
    by_row = dict.fromkeys(asked.outputs, bool(asked.rows))
    if gradient and asked.gradients:
        roots = [_of(result, name) for name in asked.upstream]
        arriving = [torch.randn_like(x) for x in roots]
        for name, x in zip(asked.upstream, arriving, strict=True):
            source.name(x, _names(source, f"gradient of {name}", x, 1 if asked.rows else 0, row))
        inputs = [given[name] for name in asked.gradients]
        made |= {
            f"d_{n}": x for n, x in zip(asked.gradients, torch.autograd.grad(roots, inputs, arriving), strict=True)
        }
        by_row |= {f"d_{name}": name in asked.rows for name in asked.gradients}
    return {name: _short(source.hashes(x[row] if by_row[name] else x)) for name, x in made.items()}


def _of(result: Any, name: str) -> Tensor:
    """A field of a result; the result itself where that is a tensor."""
    found: Tensor = result if isinstance(result, Tensor) else getattr(result, name)
    return found


def _names(source: Reader, name: str, x: Tensor, rows: int, row: int) -> Hashes:
    """Hashes of an argument's elements: by their place in the row, those of other rows than one under another name."""
    inner = int(np.prod(x.shape[rows:], dtype=int))
    place = np.arange(inner, dtype=np.uint64).reshape(x.shape[rows:])
    pieces = x.element_size() // 2
    own = source.leaf(name, place, pieces)
    if not rows:
        return own
    count = int(np.prod(x.shape[:rows], dtype=int))
    other = np.arange(count, dtype=np.uint64).reshape(-1, *[1] * place.ndim) * np.uint64(inner) + place
    named = source.leaf(f"{name} of other rows", other, pieces)
    named[row] = own
    return named.reshape(*x.shape, pieces)


def _short(hashes: Hashes) -> str:
    return sha256(np.ascontiguousarray(hashes).tobytes()).hexdigest()[:12]


def equal(found: Iterable[Certificate]) -> dict[str, list[Certificate]]:
    """Certificates by hash, those that are there."""
    groups: dict[str, list[Certificate]] = {}
    for c in found:
        if c.hash:
            groups.setdefault(c.hash, []).append(c)
    return groups
