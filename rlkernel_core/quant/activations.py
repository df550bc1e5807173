"""Quantizing what comes into a matmul: a token, or blocks of its columns, on its own.

    token_int8    s = max |x| / 127 of the token; q = rint(x / s) clamped to -127..127
    token_fp8     s = max |x| / M of the token, M the largest value (e4m3fn: 448); q = x / s by a saturating cast
    block128_fp8  the same for every 128 columns of a token
    mxfp8         blocks of 32 columns, s a power of two: `rlkernel_core.quant.mx` with a token for a row of a weight
    nvfp4         blocks of 16 columns, an e4m3 s for each and g = max |x| / 2688 for the token: the rules of
                  `rlkernel_core.quant.nvfp4`, whose g of a weight is one for all

Scales are dynamic: of the token (or a block of its columns) alone, so a row's result does not depend on the batch. A
token or block of zeros gives zeros. One with an inf or NaN has scale NaN (byte 255 for mxfp8), and gives NaN; it has no
part in g. The first three kinds compute in fp32, and in float64 for float64 x; the others round x to fp32 first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from rlkernel_core import checks
from rlkernel_core.errors import ArgumentError
from rlkernel_core.quant import mx, nvfp4
from rlkernel_core.quant.float8 import FLOAT8, saturating_cast
from rlkernel_core.quant.spec import QuantSpec, validated

# kind -> the format of a weight that it goes with by default; other elements and rules are those of another spec.
KINDS: Final[Mapping[str, QuantSpec]] = {
    "token_int8": QuantSpec.named("int8_w8a8"),
    "token_fp8": QuantSpec.named("fp8_channel", act="token_fp8"),
    "block128_fp8": QuantSpec.named("fp8_block128", act="block128_fp8"),
    "mxfp8": QuantSpec.named("mxfp8", act="mxfp8"),
    "nvfp4": QuantSpec.named("nvfp4", act="nvfp4"),
}
_INT8_ROWS: Final = QuantSpec.named("int8_channel")
_FP8_ROWS: Final = {element: QuantSpec.named("fp8_channel", element=element) for element in FLOAT8}


@dataclass(frozen=True)
class QuantActivation:
    """A quantized input of a matmul."""

    codes: Tensor  # [..., K] int8 or float8; nvfp4: uint8 [..., ceil(K / 2)], the low nibble is the even column
    scale: Tensor  # [..., G]: G is 1, or one for 128, 32 or 16 columns; fp32 (float64 for float64 x), uint8, e4m3fn
    global_scale: Tensor | None = None  # [..., 1] fp32, of nvfp4
    columns: int | None = None  # K, where codes are packed

    def value(self) -> Tensor:  # -> [..., K]
        """What the codes stand for, [..., K], in fp32; in float64 where the scale is."""
        if self.global_scale is not None:
            columns = self.codes.shape[-1] * 2 if self.columns is None else self.columns
            scale = _spread(self.scale.float() * self.global_scale, 16, columns)
            flat = mx.valued(self.codes.reshape(-1, self.codes.shape[-1]), KINDS["nvfp4"], columns)
            return flat.view(*self.codes.shape[:-1], columns) * scale
        columns = self.codes.shape[-1]
        powers = self.scale.dtype == torch.uint8
        scale = mx.power(self.scale) if powers else self.scale
        size = 32 if powers else columns if scale.shape[-1] == 1 else 128
        codes = self.codes.float().to(scale.dtype)  # float8 casts to fp32 everywhere
        return codes * _spread(scale, size, columns)


def checked(x: Tensor, kind: str | QuantSpec) -> QuantSpec:
    """The spec that `kind` stands for; both arguments of `quantize_activation` are checked."""
    checks.tensor("x", x, kind="floating")
    if x.dim() < 1 or not x.shape[-1]:
        raise ArgumentError("x", checks.describe(x), "needs a last dimension K >= 1", "Pass [..., K].")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ArgumentError("x", checks.describe(x), "requires a gradient, and codes have none", "Pass x.detach().")
    spec = validated(kind) if isinstance(kind, QuantSpec) else KINDS[checks.choice("kind", kind, KINDS)]
    if spec.act == "none":
        raise ArgumentError("kind", spec.kind, "leaves x as it is", f"Choose from {', '.join(KINDS)}.")
    return spec


def row_format(spec: QuantSpec) -> QuantSpec:
    """The format of a weight whose rows are coded as `spec.act` codes tokens, or blocks of 128 columns of one.

    That of "nvfp4" has one second scale for all rows, where tokens have their own.
    """
    if spec.act == "token_int8":
        return _INT8_ROWS
    if spec.act in {"token_fp8", "block128_fp8"}:
        return _FP8_ROWS[spec.element]
    if spec.act == "mxfp8" and spec.element == "e2m1":  # of an mxfp4 weight
        return replace(KINDS["mxfp8"], scale_rule=spec.scale_rule)
    return spec


def quantize_activation(x: Tensor, kind: str | QuantSpec) -> QuantActivation:
    """Quantize an input of a matmul in plain torch: the rules of `rlkernel.quantize_activation`, which says the rest.

    Args:
        x: [..., K].
        kind: a name of `KINDS`, or the spec of a weight that asks for one by `act`.

    Raises:
        ArgumentError, ArgumentTypeError, UnknownNameError: as `checked` finds.
    """
    spec = checked(x, kind)
    rows = x.reshape(-1, x.shape[-1])
    rows = rows.to(torch.float64 if x.dtype == torch.float64 and spec.act not in {"mxfp8", "nvfp4"} else torch.float32)
    made = _RULES.get(spec.act, _by_division)(rows, spec)
    parts = {n: None if p is None else p.view(*x.shape[:-1], p.shape[-1]) for n, p in made.items()}
    return QuantActivation(**parts, columns=x.shape[-1])


def _by_division(x: Tensor, spec: QuantSpec) -> dict[str, Tensor]:  # x [M, K] fp32 or float64
    size = 128 if spec.act == "block128_fp8" else x.shape[1]
    blocks = _blocks(x, size)
    largest = 127.0 if spec.act == "token_int8" else FLOAT8[spec.element].max
    most = blocks.abs().amax(-1, keepdim=True)
    scale = most / torch.full_like(most, largest)  # a scalar divisor is a product with 1 / largest on CUDA
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    ratio = (blocks / torch.where(scale > 0, scale, torch.inf)).nan_to_num_(nan=0.0).flatten(1)[:, : x.shape[1]]
    if spec.act == "token_int8":
        codes = ratio.round().clamp(-127, 127).to(torch.int8)
    else:
        codes = saturating_cast(ratio.float(), spec.element)
    return {"codes": codes, "scale": scale.squeeze(-1)}


def _by_powers(x: Tensor, spec: QuantSpec) -> dict[str, Tensor]:  # x [M, K] fp32
    spec = row_format(spec)
    scale = mx.scale_of(_blocks(x, 32).abs().amax(-1), spec)
    ratio = (x / _spread(mx.power(scale), 32, x.shape[1])).nan_to_num_(nan=0.0)
    return {"codes": mx.coded(ratio, spec), "scale": scale}


def _by_two_scales(x: Tensor, spec: QuantSpec) -> dict[str, Tensor]:  # x [M, K] fp32
    most = _blocks(x, 16).abs().amax(-1)
    top = torch.where(most.isfinite(), most, 0).amax(1, keepdim=True)
    of_token, scale = nvfp4.scales_of(most, top)
    divisor = scale.float() * of_token
    divisor = _spread(torch.where(divisor > 0, divisor, torch.inf), 16, x.shape[1])
    codes = mx.coded((x / divisor).nan_to_num_(nan=0.0), spec)
    return {"codes": codes, "scale": scale, "global_scale": of_token}


_RULES: Final = {"mxfp8": _by_powers, "nvfp4": _by_two_scales}


def _blocks(x: Tensor, size: int) -> Tensor:  # [M, K] -> [M, ceil(K / size), size]
    """Blocks of columns, the last filled with zeros."""
    filled = torch.nn.functional.pad(x, (0, -x.shape[1] % size))
    return filled.view(x.shape[0], filled.shape[1] // size, size)


def _spread(scale: Tensor, size: int, columns: int) -> Tensor:  # [..., G] -> [..., columns]
    """The scale of every column's block."""
    return scale.repeat_interleave(size, -1)[..., :columns]
