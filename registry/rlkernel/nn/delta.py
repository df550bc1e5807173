"""What changed between two versions of a weight, as bytes to send, and the same change made to a copy of the older one.

    sent = {name: nn.weight_delta(old[name], new[name]) for name in new}     # uint8 [bytes] each
    ...
    for name, delta in sent.items():
        nn.apply_delta_(weights[name], delta)                               # the bits of new, or an error

An update of reinforcement learning changes a few per cent of the elements of bf16 weights. Bits are compared, not
values: a NaN equals a NaN of the same bits, and 0 differs from -0. A weight is one tensor, or the parts of a packed
one.

A delta is int64 words, little-endian: a header; for each part the number of its changed elements, -1 where all of it
is sent; then for each part, every field padded to whole words,

    int32 [blocks]     changed elements of each block of 65,536
    int16 [changed]    place in the block, less 32,768
    bits [changed]     new elements

or all of its elements where that is shorter. A changed element takes its own size and two bytes; besides, 65,536
elements take four.

Checksums are sums over words w at places i of splitmix64's finalizer of w + i g (Steele et al. 2014,
doi:10.1145/2660193.2660195) modulo 2^64. The finalizer is one to one, so a change of one word always shows; others are
missed once in 2^64. They find accidents, not forgeries.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Final

import torch
from torch import Tensor

from rlkernel import spread
from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError, ArgumentTypeError
from rlkernel_core.quant.tensor import QuantTensor

_MAGIC: Final = 0x31_41_54_4C_45_44_4C_52  # "RLDELTA1"
_HEADER: Final = 7  # words: magic, number of words, checksum of the others, form, older, newer, parts
_BLOCK: Final = 1 << 16  # elements
_HALF: Final = 1 << 15
_WHOLE: Final = -1
_WORDS: Final = 1 << 20  # hashed at once
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS: Final = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


def weight_delta(old: Tensor | QuantTensor, new: Tensor | QuantTensor) -> Tensor:  # -> [bytes] uint8
    """What turns the bits of one version of a weight into those of another; neither is written to.

    Args:
        old: a tensor [...] of any dtype with elements of 1, 2, 4 or 8 bytes, or a packed weight of any layout.
        new: one [...] of the same dtype, shape, layout and device.

    Returns:
        uint8 [bytes] on their device, contiguous, a multiple of 8 bytes: for any transport of tensors. Its size depends
        on what changed, so the host waits for the device.

    Raises:
        ArgumentTypeError: one of them is neither, or a DTensor: pass what this rank has of it.
        ArgumentError: the two differ in more than bits.
    """
    mine, theirs = _parts("old", old), _parts("new", new)
    if _form(old) != _form(new) or mine[0].device != theirs[0].device:
        remedy = "Pass two versions of one weight, on one device."
        raise ArgumentError("new", _described(new), f"must be as old, {_described(old)}", remedy)
    counts, fields = [], []
    for a, b in zip(mine, theirs, strict=True):
        at = (a != b).nonzero().squeeze(1)
        count = at.numel()
        if _sparse_words(a, count) < _words(a.nbytes):
            per_block = torch.bincount(at // _BLOCK, minlength=_blocks(a)).int()
            fields += [per_block, (at % _BLOCK - _HALF).to(torch.int16), b[at]]
        else:
            fields, count = [*fields, b], _WHOLE
        counts.append(count)
    body = torch.cat([_padded(field) for field in fields]).view(torch.int64)
    head = [_MAGIC, _HEADER + len(counts) + len(body), 0, _form(old), 0, 0, len(counts), *counts]
    delta = torch.cat([torch.tensor(head, device=body.device), body])
    delta[4], delta[5] = _checksum(mine), _checksum(theirs)
    delta[2] = _checksum([delta])  # of a 0 in its own place
    return delta.view(torch.uint8)


def apply_delta_(weight: Tensor | QuantTensor, delta: Tensor) -> None:
    """Make the change of `weight_delta` in place: the weight gets the newer version's bits and keeps its addresses.

    Args:
        weight: the older version [...]; a parameter too. It may be on another device than the delta.
        delta: uint8 [bytes], as `weight_delta` returned it.

    Raises:
        ArgumentTypeError: `delta` is no such tensor, or the weight is a DTensor or no weight.
        ArgumentError: the delta is damaged or belongs to a weight of another form, the weight is not the older version,
            or its elements share memory. Nothing is written then: checksums of both are compared before.
    """
    parts = _parts("weight", weight)
    if any(_overlaps(x) for x in _tensors(weight)):
        remedy = "Pass a weight with memory of its own."
        raise ArgumentError("weight", _described(weight), "has elements that share memory", remedy)
    words = _read(delta, parts[0].device)
    total, check, form, older, newer, many = words[1:_HEADER].tolist()
    unsigned = words.clone()
    unsigned[2] = 0
    if total != len(words) or _checksum([unsigned]).item() != check:
        raise ArgumentError("delta", f"{delta.numel()} bytes", "is damaged: its checksum differs", "Send it again.")
    if form != _form(weight) or many != len(parts):
        remedy = "Apply it to the weight that it was made of."
        raise ArgumentError("delta", "a delta", f"is of a weight of another form than {_described(weight)}", remedy)
    changes = _changes(words[_HEADER:], parts)
    have = _checksum(parts).item()
    if have != older:
        state = "is the newer version already" if have == newer else "is not the version that the delta starts from"
        raise ArgumentError("weight", _described(weight), state, "Apply deltas in order, or send the whole weight.")
    with torch.no_grad():
        for target, part, (at, value) in zip(_tensors(weight), parts, changes, strict=True):
            if at is None:
                part.copy_(value)
            else:
                part[at] = value
            if part.data_ptr() != target.data_ptr():  # strided: changed beside it, then copied
                target.copy_(part.view(target.dtype).view(target.shape))


def _tensors(weight: Tensor | QuantTensor) -> list[Tensor]:
    return list(weight.parts.values()) if isinstance(weight, QuantTensor) else [weight.detach()]


def _parts(name: str, weight: Tensor | QuantTensor) -> list[Tensor]:
    """Bits of all tensors, flat; views where those are contiguous."""
    if not isinstance(weight, Tensor | QuantTensor):
        raise ArgumentTypeError(name, checks.describe(weight), "must be a tensor or a packed weight", "Pass a weight.")
    found = spread.described(weight)
    if found is not None:
        remedy = f"Pass {name}.to_local(), of ranks that hold the same shard, or {name}.full_tensor()."
        raise ArgumentTypeError(name, found, "must be a tensor of this rank", remedy)
    tensors = _tensors(weight)
    if any(x.layout != torch.strided or x.itemsize not in _BITS for x in tensors):
        remedy = "Pass a dense tensor with elements of 1, 2, 4 or 8 bytes."
        raise ArgumentTypeError(name, checks.describe(weight), "has no bits to compare", remedy)
    return [x.contiguous().view(-1).view(_BITS[x.itemsize]) for x in tensors]


def _overlaps(x: Tensor) -> bool:
    """Whether elements may share memory: some stride is not beyond what all smaller ones reach."""
    reached = 0
    for step, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and step <= reached:
            return x.numel() > 0
        reached += (size - 1) * step
    return False


def _form(weight: Tensor | QuantTensor) -> int:
    """64 bits of everything but bits: format, layout, and dtype and shape of each part."""
    said: list[object] = [(str(x.dtype), list(x.shape)) for x in _tensors(weight)]
    if isinstance(weight, QuantTensor):
        said += [asdict(weight.spec), list(weight.shape), str(weight.dtype), weight.layout, list(weight.parts)]
    digest = hashlib.sha256(json.dumps(said).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _described(weight: Tensor | QuantTensor) -> str:
    return repr(weight) if isinstance(weight, QuantTensor) else checks.describe(weight)


def _blocks(part: Tensor) -> int:
    return -(-part.numel() // _BLOCK)


def _words(size: int) -> int:
    """How many words hold `size` bytes."""
    return -(-size // 8)


def _sizes(part: Tensor, count: int) -> tuple[int, ...]:
    """Bytes of the fields of a part, of which so many elements changed."""
    if count == _WHOLE:
        return (part.nbytes,)
    return (4 * _blocks(part), 2 * count, part.itemsize * count)


def _sparse_words(part: Tensor, count: int) -> int:
    return sum(map(_words, _sizes(part, count)))


def _padded(field: Tensor) -> Tensor:  # -> [bytes] uint8
    raw = field.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -raw.numel() % 8))


def _read(delta: Tensor, device: torch.device) -> Tensor:  # -> [words] int64
    if not isinstance(delta, Tensor) or delta.dtype != torch.uint8 or delta.dim() != 1:
        remedy = "Pass what weight_delta returned."
        raise ArgumentTypeError("delta", checks.describe(delta), "must be a uint8 tensor [bytes]", remedy)
    moved = delta.detach().to(device)
    whole = moved.numel() >= 8 * _HEADER and moved.numel() % 8 == 0
    words = moved.clone(memory_format=torch.contiguous_format).view(torch.int64) if whole else None
    if words is None or words[0].item() != _MAGIC:
        raise ArgumentError("delta", f"{delta.numel()} bytes", "is no delta, or a damaged one", "Send it again.")
    return words


def _changes(words: Tensor, parts: list[Tensor]) -> list[tuple[Tensor | None, Tensor]]:
    """Places, None for all, and new bits of every part."""
    counts, raw, at = words[: len(parts)].tolist(), words[len(parts) :].view(torch.uint8), 0
    found: list[tuple[Tensor | None, Tensor]] = []
    sane = len(counts) == len(parts) and all(
        count == _WHOLE or 0 <= count <= part.numel() for count, part in zip(counts, parts, strict=False)
    )
    if not sane or sum(_sparse_words(p, n) for p, n in zip(parts, counts, strict=True)) * 8 != raw.numel():
        raise ArgumentError("delta", f"{raw.numel()} bytes", "does not fit the weight", "Make the delta again.")

    def field(size: int, dtype: torch.dtype) -> Tensor:
        nonlocal at
        first, at = at, at + 8 * _words(size)
        return raw[first : first + size].view(dtype)

    for part, count in zip(parts, counts, strict=True):
        if count == _WHOLE:
            found.append((None, field(part.nbytes, part.dtype)))
            continue
        sizes = _sizes(part, count)
        per_block, place = field(sizes[0], torch.int32).long(), field(sizes[1], torch.int16).long() + _HALF
        starts = torch.arange(len(per_block), device=part.device) * _BLOCK
        if int(per_block.sum()) != count or bool((per_block < 0).any()):
            problem = "does not hold as many changes as it counts"
            raise ArgumentError("delta", f"{raw.numel()} bytes", problem, "Make the delta again.")
        where = starts.repeat_interleave(per_block) + place
        if count and int(where.max()) >= part.numel():
            problem = "changes an element beyond the end of the weight"
            raise ArgumentError("delta", int(where.max()), problem, "Make the delta again.")
        found.append((where, field(sizes[2], part.dtype)))
    return found


def _mixed(x: Tensor) -> Tensor:
    """splitmix64's finalizer, of int64 that wraps."""
    for shift, factor in _ROUNDS:
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def _checksum(parts: list[Tensor]) -> Tensor:  # -> [] int64
    """Of all bits of the parts and their places, on their device."""
    total = torch.zeros((), dtype=torch.int64, device=parts[0].device)
    for number, part in enumerate(parts):
        raw, of_part = part.view(torch.uint8), torch.zeros_like(total)
        for start in range(0, raw.numel(), 8 * _WORDS):
            words = _padded(raw[start : start + 8 * _WORDS]).view(torch.int64)
            place = torch.arange(start // 8 + 1, start // 8 + 1 + len(words), device=raw.device)
            of_part += _mixed(words + place * _GOLDEN).sum()
        total += _mixed(of_part + torch.full_like(total, number + 1) * _GOLDEN)
    return total
