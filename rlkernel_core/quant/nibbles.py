"""Several codes in a byte: two of 4 bits, low or high nibble first; eight of 1 bit or four of 2.

Legend: codes uint8 of 0..15 along the last dimension, C of them; bytes ceil(C / 2). An odd C leaves a nibble of 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_low_first(codes: Tensor) -> Tensor:  # [..., C] uint8 -> [..., ceil(C / 2)]
    """Code 2i in bits 0..3 of byte i, code 2i + 1 in bits 4..7."""
    even, odd = _pairs(codes)
    return even | (odd << 4)


def unpack_low_first(packed: Tensor, count: int) -> Tensor:  # [..., ceil(C / 2)] -> [..., C] uint8
    """Inverse of `pack_low_first`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :count]


def pack_high_first(codes: Tensor) -> Tensor:  # [..., C] uint8 -> [..., ceil(C / 2)]
    """Code 2i in bits 4..7 of byte i, code 2i + 1 in bits 0..3, as bitsandbytes stores its 4-bit formats."""
    even, odd = _pairs(codes)
    return (even << 4) | odd


def unpack_high_first(packed: Tensor, count: int) -> Tensor:  # [..., ceil(C / 2)] -> [..., C] uint8
    """Inverse of `pack_high_first`."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)[..., :count]


def pack_bits(codes: Tensor, bits: int) -> Tensor:  # [..., C] uint8 below 2^bits -> [..., ceil(C bits / 8)]
    """Code c at bits (c % n) * bits of byte c // n, n = 8 / bits."""
    many = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % many))
    packed = torch.zeros_like(codes[..., ::many])
    for place in range(many):
        packed |= codes[..., place::many] << (place * bits)
    return packed


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:  # [..., ceil(C bits / 8)] -> [..., C] uint8
    """Inverse of `pack_bits`."""
    spread = [(packed >> place) & ((1 << bits) - 1) for place in range(0, 8, bits)]
    return torch.stack(spread, dim=-1).flatten(-2)[..., :count]


def _pairs(codes: Tensor) -> tuple[Tensor, Tensor]:
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2], codes[..., 1::2]
