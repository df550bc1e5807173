"""NF4: 4-bit codes into a table of normal quantiles, blocks of 64 or 128, scales quantized again if asked for.

The storage of bitsandbytes (QLoRA, arXiv 2305.14314): the weight is flattened row-major, a block is 64 (or 128)
consecutive elements whatever the row length, and the first code of a byte is its high nibble.

Quantize, in fp32: a = max |w| of the block; x = w / a; code = number of midpoints between table entries that are
below x (a tie takes the lower code).
Double quantization: offset = mean(a) (in float64, rounded to fp32); blocks of 256 of a - offset are divided by their
own maximum b and coded into the 256 values of the dynamic map, nearest first, ties to the lower code.
Dequantize: a = fl32(fl32(map[code] * b) + offset), a multiplication and then an addition, never fused;
w' = fl32(table[code] * a); then one rounding to the dtype asked for.

A block of zeros gives zeros. A block with an inf or NaN has scale NaN and dequantizes to NaN; with double
quantization that holds for the 256 blocks that share b. Nothing else is touched.

Storage: `codes` uint8 [ceil(Nout K / 2)]; `absmax` fp32 [blocks], or uint8 with `nested_absmax` fp32
[ceil(blocks / 256)] and `nested_offset` fp32 [1]; the tables `table` fp32 [16] and `nested_table` fp32 [256].
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from rlkernel_core.quant import codec, nibbles
from rlkernel_core.quant.grid import extremes
from rlkernel_core.quant.spec import QuantSpec

_NESTED: Final = 256  # scales that share a scale
_CELLS: Final = 33  # of width 1/16 in [-1, 1]
_BLOCK: Final = 1 << 20  # elements coded at once; whole blocks and bytes

# arXiv 2305.14314, appendix E; as fp32.
TABLE: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class NF4:
    """The codec; `Codec` says what each method promises."""

    table: tuple[float, ...] = TABLE
    widest_gap: float = max(b - a for a, b in pairwise(TABLE))

    def code(self, ratio: Tensor, table: Tensor) -> Tensor:
        """Codes of ratios in [-1, 1]."""
        return _nearest_by_cell(ratio, table)

    def storage(self, spec: QuantSpec, shape: tuple[int, int]) -> codec.Storage:
        """Codes, scales or nested scales, tables."""
        elements = shape[0] * shape[1]
        blocks = -(-elements // spec.group)
        parts: codec.Storage = {"codes": ((-(-elements // 2),), torch.uint8)}
        if spec.double_quant:
            parts |= {
                "absmax": ((blocks,), torch.uint8),
                "nested_absmax": ((-(-blocks // _NESTED),), torch.float32),
                "nested_offset": ((1,), torch.float32),
                "nested_table": ((256,), torch.float32),
            }
        else:
            parts["absmax"] = ((blocks,), torch.float32)
        return parts | {"table": ((16,), torch.float32)}

    def constants(self, spec: QuantSpec) -> dict[str, Tensor]:
        """The tables."""
        tables = {"table": torch.tensor(self.table, dtype=torch.float32, device="cpu")}
        return tables | {"nested_table": dynamic_map()} if spec.double_quant else tables

    def encode_(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> None:
        """Scales first, then codes in blocks of the flat weight."""
        flat = weight.reshape(-1)
        absmax = _absmax(flat, spec.group)
        divisor = torch.where(absmax > 0, absmax, torch.inf)
        for start in range(0, flat.numel(), _BLOCK):
            part = flat[start : start + _BLOCK].float()
            of_part = divisor[start // spec.group : -(-(start + part.numel()) // spec.group)]
            ratio = (part / _spread(of_part, spec.group, part.numel())).nan_to_num_(nan=0.0)
            packed = nibbles.pack_high_first(self.code(ratio, parts["table"]))
            parts["codes"][start // 2 : start // 2 + packed.numel()] = packed
        if not spec.double_quant:
            parts["absmax"].copy_(absmax)
            return
        finite = absmax.isfinite()
        total = torch.where(finite, absmax, 0).double().sum() / finite.sum().clamp(min=1)
        parts["nested_offset"].copy_(total)
        rest = absmax - parts["nested_offset"]
        nested = _absmax(rest, _NESTED)
        parts["nested_absmax"].copy_(nested)
        ratio = rest / _spread(torch.where(nested > 0, nested, torch.inf), _NESTED, rest.numel())
        parts["absmax"].copy_(nearest(ratio.nan_to_num_(nan=0.0), parts["nested_table"]))

    def decode(
        self, parts: dict[str, Tensor], spec: QuantSpec, shape: tuple[int, int], start: int, stop: int
    ) -> Tensor:
        """table[code] * a in fp32."""
        first, last = start * shape[1], stop * shape[1]  # `first` is a multiple of 128: whole bytes and blocks
        codes = nibbles.unpack_high_first(parts["codes"][first // 2 : -(-last // 2)], last - first)
        value = parts["table"].index_select(0, codes.int())
        absmax = _scales(parts, spec, first // spec.group, -(-last // spec.group))
        return (value * _spread(absmax, spec.group, last - first)).view(stop - start, shape[1])

    def error_bound(self, parts: dict[str, Tensor], weight: Tensor, spec: QuantSpec) -> Tensor:
        """Half the widest gap of the table, times a; and the scale's own error where it was quantized."""
        flat = weight.detach().reshape(-1)
        exact = _absmax(flat, spec.group).double()
        stored = _scales(parts, spec, 0, exact.numel()).double()
        bound = exact * (self.widest_gap / 2 + 2.0**-22) + (exact - stored).abs()
        return _spread(bound, spec.group, flat.numel()).view(weight.shape)


CODEC: Final = NF4()


def dynamic_map() -> Tensor:  # -> [256] fp32, ascending
    """The signed "dynamic" code of 8-bit optimizers (arXiv 2110.02861, section 1.3), with the rounding of bitsandbytes.

    Decade i of 7 is 10^(i - 6) times the midpoints of 2^i equal bins of [0.1, 1], with both signs; 0 and 1 are added.
    The bin edges are those of an fp32 linspace (one fused multiply-add per edge, counted from the nearer end), here
    in float64 and rounded once, so that the table is the same on every machine.
    """
    start, end = torch.tensor((0.1, 1.0), dtype=torch.float32, device="cpu").double()
    values = [0.0, 1.0]
    for decade in range(7):
        bins = 2**decade
        step = ((end - start).float() / bins).double()
        k = torch.arange(bins + 1, dtype=torch.float64, device="cpu")
        edges = torch.where(k < (bins + 1) // 2, start + step * k, end - step * (bins - k)).float()
        middle = (10.0 ** (decade - 6)) * ((edges[:-1] + edges[1:]) / 2)
        values += [*middle.tolist(), *(-middle).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


def _absmax(flat: Tensor, block: int) -> Tensor:  # [E] -> [blocks] fp32
    """Largest |x| of every block; NaN where it is not finite."""
    low, high = extremes(flat.unsqueeze(0), 1, block)
    absmax = torch.maximum(high, -low).abs().squeeze(0)  # no -0
    return torch.where(absmax.isfinite(), absmax, torch.nan)


def _scales(parts: dict[str, Tensor], spec: QuantSpec, first: int, last: int) -> Tensor:  # -> [last - first] fp32
    absmax = parts["absmax"][first:last]
    if not spec.double_quant:
        return absmax
    shared = torch.arange(first, last, device=absmax.device) // _NESTED
    scaled = parts["nested_table"].index_select(0, absmax.int()) * parts["nested_absmax"].index_select(0, shared)
    return scaled + parts["nested_offset"]


def _spread(per_block: Tensor, block: int, count: int) -> Tensor:  # [B] -> [count]
    return per_block.repeat_interleave(block)[:count]


def nearest(x: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of an ascending table, as uint8; ties to the lower one."""
    return torch.bucketize(x, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _nearest_by_cell(x: Tensor, table: Tensor) -> Tensor:
    """`nearest` for x in [-1, 1] and the 16 entries of NF4, five times as fast as a search.

    Midpoints are more than 1/16 apart, so a cell of that width holds at most one: an index is the number of midpoints
    in lower cells, and one more where x is above its own cell's. The cell is a monotone function of x however it is
    rounded, and midpoints are put into cells by the same function, so the result is exact.
    """
    middle = (table[:-1] + table[1:]) / 2
    cells = torch.arange(_CELLS, dtype=torch.int32, device=x.device).unsqueeze(1)
    cell_of_middle = _cell(middle)
    below = (cell_of_middle < cells).sum(1, dtype=torch.uint8)
    own = torch.where(cell_of_middle == cells, middle, torch.inf).amin(1)
    cell = _cell(x)
    return below.index_select(0, cell) + (x > own.index_select(0, cell))


def _cell(x: Tensor) -> Tensor:
    return ((x + 1) * 16).int()
