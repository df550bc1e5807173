"""Blocks of GGUF tensors: the fields of a block, interleaved in bytes, to the parts of a QuantTensor and back.

Little endian, as ggml-common.h lays them out:
    Q4_0  18 bytes / 32:   d fp16, 16 bytes: byte j has column j low and j + 16 high
    Q8_0  34 bytes / 32:   d fp16, 32 int8
    Q4_K  144 bytes / 256: d, dmin fp16, 12 bytes of eight 6-bit sc and mn, 128 bytes: of every 64 columns, the first 32
                           low and the last 32 high
    Q5_K  176 bytes / 256: as Q4_K, with 32 bytes of fifth bits before the codes: bit c of byte j is column 32 c + j
    Q6_K  210 bytes / 256: 128 bytes of low nibbles (of every 128 columns, 64 low and 64 high), 64 bytes of high bits
                           (bits 2c of byte j are column 32 c + j of 128), 16 int8 sc, d fp16
Imports torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from rlkernel.checkpoints import packing
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

Parts = dict[str, "Tensor"]


class Block(NamedTuple):
    """One type of block."""

    format: str
    columns: int
    bytes: int
    split: Callable[[Tensor], Parts]  # uint8 [N, B, bytes] -> codes uint8 or int8 [N, K], and other parts
    join: Callable[[QuantTensor], Tensor]  # its inverse, uint8 [N, B, bytes]


def read_blocks(name: str, raw: Tensor, kind: str, columns: int) -> QuantTensor:  # uint8 [N, bytes of a row]
    """The weight of a GGUF tensor of a block type."""
    import torch

    block = BLOCKS[kind]
    if columns % block.columns or raw.dim() != 2 or raw.shape[1] != columns // block.columns * block.bytes:
        problem = f"is no tensor of {kind} blocks of {block.columns} columns, K = {columns}"
        raise ArgumentError(name, list(raw.shape), problem, "Check the file.")
    parts = block.split(raw.view(raw.shape[0], -1, block.bytes))
    return packing.weight_of(name, block.format, (raw.shape[0], columns), torch.bfloat16, parts)


def write_blocks(name: str, w: QuantTensor) -> tuple[str, Tensor]:  # type, uint8 [N, bytes of a row]
    """Inverse of `read_blocks`."""
    kind = next((kind for kind, block in BLOCKS.items() if block.format == w.format), None)
    if kind is None:
        raise ArgumentError(name, w, "GGUF holds the formats named gguf_...", "Quantize it to one of those.")
    if w.shape[1] % BLOCKS[kind].columns:
        problem = f"needs K, a multiple of {BLOCKS[kind].columns}"
        raise ArgumentError(name, w, problem, "Choose a format with smaller blocks.")
    return kind, BLOCKS[kind].join(w).flatten(1).contiguous()


def _half(raw: Tensor) -> Tensor:  # uint8 [N, B, 2] -> fp16 [N, B]
    import torch

    return raw.contiguous().view(torch.float16).squeeze(-1)


def _raw(x: Tensor) -> Tensor:  # [N, B] of fp16 -> uint8 [N, B, 2]
    import torch

    return x.contiguous().unsqueeze(-1).view(torch.uint8)


def _split_q4_0(raw: Tensor) -> Parts:
    return {"codes": packing.to_bytes(_halves(raw[..., 2:], 16)), "scale": _half(raw[..., :2])}


def _join_q4_0(w: QuantTensor) -> Tensor:
    import torch

    codes = packing.of_bytes(w.parts["codes"], w.shape[1])
    return torch.cat((_raw(w.parts["scale"]), _paired(codes, 16)), -1).view(w.shape[0], -1, 18)


def _split_q8_0(raw: Tensor) -> Parts:
    import torch

    return {"codes": raw[..., 2:].contiguous().view(torch.int8).flatten(1), "scale": _half(raw[..., :2])}


def _join_q8_0(w: QuantTensor) -> Tensor:
    import torch

    codes = w.parts["codes"].view(torch.uint8).view(w.shape[0], -1, 32)
    return torch.cat((_raw(w.parts["scale"]), codes), -1)


def _halves(raw: Tensor, run: int) -> Tensor:  # uint8 [N, B, n run] -> codes [N, K]
    """Of every `run` bytes, all low nibbles and then all high ones."""
    import torch

    bytes_ = raw.reshape(*raw.shape[:-1], -1, run)
    return torch.cat((bytes_ & 15, bytes_ >> 4), -1).flatten(1)


def _paired(codes: Tensor, run: int) -> Tensor:  # inverse of _halves, [N, K / 2 / run blocks, run]
    runs = codes.view(codes.shape[0], -1, 2, run)
    return runs[:, :, 0] | (runs[:, :, 1] << 4)


def _scales_of_6_bits(raw: Tensor) -> tuple[Tensor, Tensor]:  # uint8 [N, B, 12] -> two of [N, 8 B]
    import torch

    a, b, c = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scale = torch.cat((a & 63, (c & 15) | ((a >> 6) << 4)), -1)
    least = torch.cat((b & 63, (c >> 4) | ((b >> 6) << 4)), -1)
    return scale.flatten(1), least.flatten(1)


def _bytes_of_6_bits(scale: Tensor, least: Tensor) -> Tensor:  # inverse
    import torch

    s, m = (x.view(x.shape[0], -1, 2, 4) for x in (scale, least))
    first, last = (x[:, :, 0] | ((x[:, :, 1] >> 4) << 6) for x in (s, m))
    return torch.cat((first, last, (s[:, :, 1] & 15) | ((m[:, :, 1] & 15) << 4)), -1)


def _split_q4_k(raw: Tensor) -> Parts:
    scale, least = _scales_of_6_bits(raw[..., 4:16])
    parts = {"scale": scale, "min": least, "d": _half(raw[..., :2]), "dmin": _half(raw[..., 2:4])}
    return {"codes": packing.to_bytes(_halves(raw[..., 16:], 32)), **parts}


def _head(w: QuantTensor) -> tuple[Tensor, Tensor, Tensor]:
    return _raw(w.parts["d"]), _raw(w.parts["dmin"]), _bytes_of_6_bits(w.parts["scale"], w.parts["min"])


def _join_q4_k(w: QuantTensor) -> Tensor:
    import torch

    codes = _paired(packing.of_bytes(w.parts["codes"], w.shape[1]), 32).reshape(w.shape[0], -1, 128)
    return torch.cat((*_head(w), codes), -1)


def _split_q5_k(raw: Tensor) -> Parts:
    import torch

    from rlkernel_core.quant.nibbles import pack_bits

    shifts = torch.arange(8, dtype=torch.uint8, device=raw.device).view(8, 1)
    high = (raw[..., 16:48].unsqueeze(-2) >> shifts) & 1  # [N, B, 8, 32]
    rest = _split_q4_k(torch.cat((raw[..., :16], raw[..., 48:]), -1))
    return {**rest, "high": pack_bits(high.flatten(1), 1)}


def _join_q5_k(w: QuantTensor) -> Tensor:
    import torch

    from rlkernel_core.quant.nibbles import unpack_bits

    shifts = torch.arange(8, dtype=torch.uint8, device=w.device).view(8, 1)
    bits = unpack_bits(w.parts["high"], 1, w.shape[1]).view(w.shape[0], -1, 8, 32)
    high = (bits << shifts).sum(-2, dtype=torch.uint8)
    rest = _join_q4_k(w)
    return torch.cat((rest[..., :16], high, rest[..., 16:]), -1)


def _split_q6_k(raw: Tensor) -> Parts:
    import torch

    from rlkernel_core.quant.nibbles import pack_bits

    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=raw.device).view(4, 1)
    high = (raw[..., 128:192].reshape(*raw.shape[:-1], 2, 1, 32) >> shifts) & 3  # [N, B, 2, 4, 32]
    return {
        "codes": packing.to_bytes(_halves(raw[..., :128], 64)),
        "high": pack_bits(high.flatten(1), 2),
        "scale": raw[..., 192:208].contiguous().view(torch.int8).flatten(1),
        "d": _half(raw[..., 208:]),
    }


def _join_q6_k(w: QuantTensor) -> Tensor:
    import torch

    from rlkernel_core.quant.nibbles import unpack_bits

    rows = w.shape[0]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=w.device).view(4, 1)
    bits = unpack_bits(w.parts["high"], 2, w.shape[1]).view(rows, -1, 2, 4, 32)
    low = _paired(packing.of_bytes(w.parts["codes"], w.shape[1]), 64).reshape(rows, -1, 128)
    high = (bits << shifts).sum(-2, dtype=torch.uint8).view(rows, -1, 64)
    scale = w.parts["scale"].view(torch.uint8).view(rows, -1, 16)
    return torch.cat((low, high, scale, _raw(w.parts["d"])), -1)


BLOCKS: Final[Mapping[str, Block]] = {
    "Q4_0": Block("gguf_q4_0", 32, 18, _split_q4_0, _join_q4_0),
    "Q8_0": Block("gguf_q8_0", 32, 34, _split_q8_0, _join_q8_0),
    "Q4_K": Block("gguf_q4_k", 256, 144, _split_q4_k, _join_q4_k),
    "Q5_K": Block("gguf_q5_k", 256, 176, _split_q5_k, _join_q5_k),
    "Q6_K": Block("gguf_q6_k", 256, 210, _split_q6_k, _join_q6_k),
}
