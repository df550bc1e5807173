"""Moving 4-bit codes between the words of checkpoints and the bytes of QuantTensors, and what every reader checks.

Canonical: uint8 [N, ceil(K / 2)], the low nibble is the even column.
Imports torch inside functions only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import QuantSpec, QuantTensor

if TYPE_CHECKING:
    from torch import Tensor

PLAIN: Final = (0, 1, 2, 3, 4, 5, 6, 7)  # nibble of every logical column of a word
AWQ: Final = (0, 4, 1, 5, 2, 6, 3, 7)
GROUPS: Final = {32: "g32", 64: "g64", 128: "g128"}


def of_words(words: Tensor, order: Sequence[int] = PLAIN) -> Tensor:  # int32 [..., W] -> uint8 [..., 8 W]
    """Codes of int32 words; entry c of `order` is the nibble of column c."""
    import torch

    shifts = torch.tensor([4 * nibble for nibble in order], dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)


def to_words(codes: Tensor, order: Sequence[int] = PLAIN) -> Tensor:  # uint8 [..., 8 W] -> int32 [..., W]
    """Inverse of `of_words`."""
    import torch

    groups = codes.reshape(*codes.shape[:-1], -1, 8).to(torch.int32)
    words = torch.zeros(groups.shape[:-1], dtype=torch.int32, device=codes.device)
    for column, nibble in enumerate(order):
        words |= groups[..., column] << (4 * nibble)
    return words


def to_bytes(codes: Tensor) -> Tensor:  # uint8 [N, K] -> [N, ceil(K / 2)]
    """Canonical bytes of codes."""
    from rlkernel_core.quant.nibbles import pack_low_first

    return pack_low_first(codes).contiguous()


def of_bytes(packed: Tensor, columns: int) -> Tensor:  # uint8 [N, ceil(K / 2)] -> [N, K]
    """Codes of canonical bytes."""
    from rlkernel_core.quant.nibbles import unpack_low_first

    return unpack_low_first(packed, columns)


def sized(name: str, tensor: Tensor, shape: Sequence[int], why: str) -> None:
    """A tensor has the sizes that the others imply."""
    if tuple(tensor.shape) != tuple(shape):
        raise ArgumentError(name, list(tensor.shape), f"must be {list(shape)}, {why}", "Check the file.")


def group_of(name: str, columns: int, groups: int) -> str:
    """The suffix of an int4 format whose rows of K columns have this many groups."""
    if groups == 1:
        return "channel"
    found = [suffix for size, suffix in GROUPS.items() if -(-columns // size) == groups]
    if not found:
        problem = (
            f"has {groups} groups for K = {columns}; groups of {', '.join(map(str, GROUPS))} or whole rows are read"
        )
        raise ArgumentError(name, f"{groups} groups", problem, "Quantize the model with one of those group sizes.")
    return found[0]


def grouped_columns(name: str, g_idx: Tensor, groups: int, columns: int) -> bool:
    """Whether `g_idx` is an order of its own; every group must have its share of columns.

    Raises:
        ArgumentError: wrong length, a group that does not exist, or one with too many or too few columns.
    """
    import torch

    sized(name, g_idx, (columns,), "one entry per column")
    if int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
        got = f"{int(g_idx.min())}..{int(g_idx.max())}"
        raise ArgumentError(name, got, f"must be within 0..{groups - 1}, the groups of scales", "Check the file.")
    size = -(-columns // groups)
    counts = torch.bincount(g_idx.long(), minlength=groups)
    plain = torch.arange(columns, device=g_idx.device) // size
    if int(counts.max()) > size or int(counts[:-1].min() if groups > 1 else size) < size:
        problem = f"every group must have {size} columns"
        raise ArgumentError(name, f"groups of {int(counts.min())} to {int(counts.max())}", problem, "Check the file.")
    return not torch.equal(g_idx.long(), plain)


def weight_of(
    name: str,
    kind: str,
    shape: tuple[int, int],
    dtype: Any,
    parts: Mapping[str, Tensor],
    **options: Any,
) -> QuantTensor:
    """A QuantTensor whose parts have the sizes of its format and whose scales are numbers.

    Raises:
        ArgumentError: a part of another size or dtype, a scale that is inf or NaN, or a scale of 0 for codes that are
            not those of 0: signs of a damaged file.
    """
    from rlkernel_core.quant.codec import codec_of

    spec = QuantSpec.named(kind, **options)
    order = list(codec_of(spec).storage(spec, shape))  # that of a weight quantized here
    held = {part: parts[part].contiguous() for part in sorted(parts, key=[*order, *parts].index)}
    w = QuantTensor(spec, shape, dtype, held)
    w.validate()
    for part in ("scale", "absmax", "nested_absmax", "global_scale", "d", "dmin", "zero"):
        if part in held and held[part].is_floating_point():
            values = held[part].float()
            if not bool(values.isfinite().all()):
                got = f"{int((~values.isfinite()).sum())} of {values.numel()} values"
                raise ArgumentError(f"{name}: {part}", got, "must be finite", "The file is damaged; write it anew.")
    if w.spec.scale_dtype == "e8m0" and bool((held["scale"] == 255).any()):
        raise ArgumentError(f"{name}: scale", "a byte of 255", "is NaN", "The file is damaged; write it anew.")
    _no_lost_values(name, w)
    return w


def _no_lost_values(name: str, w: QuantTensor) -> None:
    """A scale of 0 belongs to codes of 0."""
    import torch

    scale = w.parts.get("scale")
    if scale is None or not scale.is_floating_point() or scale.dtype == getattr(torch, "float8_e4m3fn", None):
        return
    if bool((scale != 0).all()):
        return
    from rlkernel_core.quant import dequantize

    ones = QuantTensor(w.spec, w.shape, w.dtype, {**w.parts, "scale": (scale == 0).to(scale.dtype)})
    lost = int((dequantize(ones, dtype=torch.float32) != 0).sum())
    if lost:
        problem = f"is 0 for {lost} codes that are not those of 0"
        raise ArgumentError(f"{name}: scale", "0", problem, "The file is damaged; write it anew.")
