"""Rows or columns of a quantized weight, such as those of one rank: their values are those of the whole, bit for bit.

    rows(w, 0, N // 2)        # [N / 2, K]: half of the outputs
    columns(w, 0, K // 2)     # [N, K / 2]: half of the inputs

Cuts lie between blocks. Formats whose blocks run over the flattened weight (nf4, fp4), and those whose columns are put
into groups in an order of their own, have no columns to cut.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant.codec import codec_of
from rlkernel_core.quant.spec import QuantSpec
from rlkernel_core.quant.tensor import CANONICAL, QuantTensor, check_layout

_NESTED: Final = 256  # scales that share a scale of their own, with double_quant


def rows(w: QuantTensor, start: int, stop: int) -> QuantTensor:  # of [Nout, K] -> [stop - start, K]
    """Rows start..stop; a view of the weight's memory.

    Raises:
        ArgumentError: not within the weight, or a cut goes through a block.
        LayoutError: the weight is not canonical: cut first, prepack then.
    """
    total, K = w.shape
    _check(w, "rows", start, stop, total)
    if (start, stop) == (0, total):
        return w
    for cut in (start, stop):
        if cut != total and not whole_rows(w.spec, cut, K, flat="absmax" in w.parts):
            raise ArgumentError("rows", cut, f"cuts through a block of {w.spec}", "Cut elsewhere, or quantize parts.")
    return _cut(w, 0, (start, K), (stop, K), (stop - start, K))


def columns(w: QuantTensor, start: int, stop: int) -> QuantTensor:  # of [Nout, K] -> [Nout, stop - start]
    """Columns start..stop; a view of the weight's memory.

    Raises:
        ArgumentError: not within the weight, a cut goes through a group, or the format has no columns to cut.
        LayoutError: the weight is not canonical: cut first, prepack then.
    """
    N, total = w.shape
    _check(w, "columns", start, stop, total)
    if (start, stop) == (0, total):
        return w
    if "absmax" in w.parts or "g_idx" in w.parts:
        remedy = "Take a format with groups along K, such as int4_g128."
        raise ArgumentError("w", w.spec.kind, "has groups that are no runs of columns", remedy)
    step = w.spec.group or 2  # two codes a byte
    for cut in (start, stop):
        if cut != total and cut % step:
            raise ArgumentError("columns", cut, f"is no multiple of {step}, a group of {w.spec}", "Cut between groups.")
    return _cut(w, 1, (N, start), (N, stop), (N, stop - start))


def whole_rows(spec: QuantSpec, count: int, K: int, *, flat: bool) -> bool:
    """Whether what follows the first `count` rows starts a byte, a block and a scale of its own."""
    if flat:  # blocks of the flat weight
        return count * K % (_NESTED * spec.group if spec.double_quant else spec.group) == 0
    return spec.rows <= 1 or count % spec.rows == 0


def _check(w: QuantTensor, name: str, start: int, stop: int, total: int) -> None:
    check_layout("w", w, (CANONICAL,))
    if not 0 <= start < stop <= total:
        raise ArgumentError(name, (start, stop), f"must be some of 0..{total}", "Name them in order.")


def _cut(
    w: QuantTensor, dim: int, before: tuple[int, int], until: tuple[int, int], shape: tuple[int, int]
) -> QuantTensor:
    """What a weight of the shape `until` stores beyond one of the shape `before`, part by part."""
    storage = codec_of(w.spec).storage
    first, last, wanted = storage(w.spec, before), storage(w.spec, until), storage(w.spec, shape)

    def part(name: str, tensor: Tensor) -> Tensor:
        if wanted[name][0] == tuple(tensor.shape):
            return tensor  # shared by all
        at = first[name][0][dim] if before[dim] else 0
        return tensor.narrow(dim, at, last[name][0][dim] - at)

    return QuantTensor(w.spec, shape, w.dtype, {name: part(name, t) for name, t in w.parts.items()})
