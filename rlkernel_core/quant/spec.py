"""Which quantized formats exist: one table row each, and the frozen `QuantSpec` that says everything about one.

A format is a name in `FORMATS`. Its row holds the default spec, the options a spec of that name may change, and the
place of its codec, by which sources are followed: a new format is one codec file (or an old one) and one row.

Legend: a scale is shared by `rows` rows times `group` columns of the weight [Nout, K]; 0 stands for all of them.
Imports no torch: the operators' specs read this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Final

from rlkernel_core.errors import ArgumentError, ArgumentTypeError, UnknownNameError, did_you_mean


@dataclass(frozen=True)
class QuantSpec:
    """How a weight is stored: everything that quantizing, dequantizing and multiplying depend on.

    Build one with `QuantSpec.named("nf4", double_quant=True)`; the plain name stands for the row's defaults.
    """

    format: str  # a name of FORMATS
    element: str  # "int4", "int5", "int6", "int8", "nf4", "fp4", "e2m1", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"
    rows: int = 1  # rows that share a scale; 0: all
    group: int = 0  # columns that share a scale; 0: all. nf4, fp4: elements of the flattened weight
    symmetric: bool = True  # False: a zero-point (k-quants: a minimum) per group
    scale_dtype: str = "float32"  # of the scales; "e8m0": powers of two; "int6", "int8": multiples of another scale
    scale_rule: str = "absmax"  # how the quantizer finds a scale; dequantizing does not depend on it
    double_quant: bool = False  # scales are quantized themselves (nf4, fp4)
    act: str = "none"  # how qmatmul quantizes x: "none", or a kind of rlkernel_core.quant.activations
    rounding: str = "even"  # which code a tie takes; dequantizing does not depend on it
    float_zero: bool = False  # zero-points are floats of scale_dtype
    act_order: bool = False  # columns are put into groups in an order of their own, the part g_idx

    @classmethod
    def named(cls, format: str, **options: Any) -> QuantSpec:  # noqa: A002  the field's noun
        """The spec of a format, with options changed.

        Raises:
            UnknownNameError: no such format or option; the message suggests the nearest.
            ArgumentError: the format has that option, but not that value.
        """
        row = row_of(format)
        for option in options:
            if option not in row.options:
                raise UnknownNameError(f"option of format {format}", option, row.options)
        return validated(replace(row.spec, **options))

    @cached_property
    def changed(self) -> Mapping[str, Any]:
        """Options that differ from the format's defaults."""
        default = row_of(self.format).spec
        return {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != getattr(default, f.name)}

    @cached_property
    def kind(self) -> str:
        """The spec as one short string: `nf4`, `int4_g128[scale_dtype=float16]`."""
        options = ",".join(f"{name}={value}" for name, value in self.changed.items())
        return f"{self.format}[{options}]" if options else self.format

    def features(self, *options: str) -> frozenset[str]:
        """Feature names that an operator needs which depends on these options: the format's, and what differs."""
        needed = {f"format:{self.format}"}
        needed |= {option_feature(name, value) for name, value in self.changed.items() if name in options}
        return frozenset(needed)

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Format:
    """A row of the table: the default spec of a name, what may differ, and where its codec is."""

    spec: QuantSpec
    codec: str  # "module:name"
    text: str  # one line for tables
    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # option -> values it may have


_SCALE_DTYPES: Final = ("bfloat16", "float16", "float32")
_FP8: Final = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
_FP8_RULES: Final = ("absmax/max", "absmax/max_pow2")
_POWERS: Final = ("floor", "rceil", "even")  # powers of two: see rlkernel_core.quant.mx
_ROUNDINGS: Final = ("even", "away")
_GRID: Final = "rlkernel_core.quant.grid:CODEC"
_NF4: Final = "4-bit codes of a normal law's quantiles (arXiv 2305.14314)"
_FP4: Final = "4-bit floats as bitsandbytes has them"
_TABLES: Final = (
    *((name, "nf4", group, "rlkernel_core.quant.nf4:CODEC", _NF4) for name, group in (("nf4", 64), ("nf4_g128", 128))),
    *((name, "fp4", group, "rlkernel_core.quant.fp4:CODEC", _FP4) for name, group in (("fp4", 64), ("fp4_g128", 128))),
)


def _int4(name: str, group: int, *, symmetric: bool) -> Format:
    # bfloat16 scales have the range of fp32, and a 4-bit code times a bfloat16 scale is exact in fp32.
    rules = ("absmax/7.5", "absmax/7") if symmetric else ("minmax/15",)
    spec = QuantSpec(name, "int4", group=group, symmetric=symmetric, scale_dtype="bfloat16", scale_rule=rules[0])
    per = f"{group} columns" if group else "a row"
    text = f"4-bit integers, a scale{'' if symmetric else ' and a zero-point'} per {per}"
    options: dict[str, tuple[Any, ...]] = {"scale_dtype": _SCALE_DTYPES, "scale_rule": rules}
    return Format(spec, _GRID, text, options | ({"act_order": (False, True)} if group else {}))


def _int8(name: str, text: str, act: str) -> Format:
    spec = QuantSpec(name, "int8", scale_rule="absmax/127", act=act)
    return Format(spec, _GRID, text, {"scale_dtype": _SCALE_DTYPES})


def _fp8(name: str, text: str, rows: int, group: int, act: str) -> Format:
    spec = QuantSpec(name, "e4m3fn", rows=rows, group=group, scale_rule=_FP8_RULES[0])
    return Format(spec, _GRID, text, {"element": _FP8, "scale_rule": _FP8_RULES, "act": ("none", act)})


def _table(name: str, element: str, group: int, codec: str, text: str) -> Format:
    spec = QuantSpec(name, element, group=group)
    text = f"{text}, a scale per {group} elements of the flat weight"
    return Format(spec, codec, text, {"double_quant": (False, True)})


def _float_zero(name: str, group: int) -> Format:
    spec = QuantSpec(name, "int4", group=group, symmetric=False, scale_dtype="float16", scale_rule="minmax/15")
    text = f"4-bit integers, a scale and a zero-point per {group} columns, both floats (HQQ)"
    return Format(replace(spec, float_zero=True), _GRID, text, {"scale_dtype": ("float16", "bfloat16", "float32")})


def _mx(name: str, default: str, text: str, **options: tuple[Any, ...]) -> Format:
    spec = QuantSpec(name, default, group=32, scale_dtype="e8m0", scale_rule=_POWERS[0])
    offered = {"scale_rule": _POWERS, **options, "act": ("none", "mxfp8")}
    return Format(spec, "rlkernel_core.quant.mx:CODEC", text, offered)


def _kquant(name: str, element: str, text: str) -> Format:
    signed = element == "int6"
    kind, rule = ("int8", "signed_max") if signed else ("int6", "minmax")
    spec = QuantSpec(name, element, group=256, symmetric=signed, scale_dtype=kind, scale_rule=rule)
    return Format(spec, "rlkernel_core.quant.kquants:CODEC", text)


def _rows() -> tuple[Format, ...]:
    widths = (("g128", 128), ("g64", 64), ("g32", 32), ("channel", 0))
    return (
        *(_int4(f"int4_{suffix}", group, symmetric=True) for suffix, group in widths),
        *(_int4(f"int4_{suffix}_asym", group, symmetric=False) for suffix, group in widths),
        *(_table(*row) for row in _TABLES),
        Format(
            QuantSpec("q4l", "int4", group=64, scale_rule="absmax/7.5"),
            _GRID,
            "4-bit integers, an fp32 scale per 64 columns",
        ),
        *(_float_zero(*row) for row in (("hqq4", 64), ("hqq4_g32", 32), ("hqq4_g128", 128))),
        _mx("mxfp4", "e2m1", "4-bit floats, a power of two per 32 columns (OCP MX)", rounding=_ROUNDINGS),
        _mx("mxfp8", "e4m3fn", "8-bit floats, a power of two per 32 columns (OCP MX)", element=("e4m3fn", "e5m2")),
        Format(
            QuantSpec("nvfp4", "e2m1", group=16, scale_dtype="float8_e4m3fn", scale_rule="absmax/6"),
            "rlkernel_core.quant.nvfp4:CODEC",
            "4-bit floats, an e4m3 scale per 16 columns and an fp32 one for all",
            {"rounding": _ROUNDINGS, "act": ("none", "nvfp4")},
        ),
        Format(
            QuantSpec(
                "gguf_q4_0",
                "int4",
                group=32,
                scale_dtype="float16",
                scale_rule="signed_max/-8_then_round",
                rounding="up",
            ),
            _GRID,
            "4-bit integers, an fp16 scale per 32 columns (llama.cpp)",
        ),
        Format(
            QuantSpec(
                "gguf_q8_0",
                "int8",
                group=32,
                scale_dtype="float16",
                scale_rule="absmax/127_then_round",
                rounding="away",
            ),
            _GRID,
            "8-bit integers, an fp16 scale per 32 columns (llama.cpp)",
        ),
        _kquant("gguf_q4_k", "int4", "4-bit integers, a 6-bit scale and minimum per 32 of 256 columns (llama.cpp)"),
        _kquant("gguf_q5_k", "int5", "5-bit integers, a 6-bit scale and minimum per 32 of 256 columns (llama.cpp)"),
        _kquant("gguf_q6_k", "int6", "6-bit integers, an 8-bit scale per 16 of 256 columns (llama.cpp)"),
        _int8("int8_channel", "8-bit integers, a scale per row; x stays as it is", "none"),
        _int8("int8_w8a8", "8-bit integers, a scale per row; x quantized per token to 8 bits", "token_int8"),
        _fp8("fp8_tensor", "8-bit floats, one scale", 0, 0, "token_fp8"),
        _fp8("fp8_channel", "8-bit floats, a scale per row", 1, 0, "token_fp8"),
        _fp8("fp8_block128", "8-bit floats, a scale per 128 x 128 block", 128, 128, "block128_fp8"),
    )


# format -> its row: the default spec, the options that may change, where its codec is
FORMATS: Final[Mapping[str, Format]] = {row.spec.format: row for row in _rows()}


def row_of(name: str) -> Format:
    """The table row of a format name."""
    if not isinstance(name, str) or name not in FORMATS:
        raise UnknownNameError("format", str(name), FORMATS)
    return FORMATS[name]


def option_feature(option: str, value: Any) -> str:
    """Feature name of an option that is not the default: `double_quant`, `element:e5m2`."""
    return option if value is True else f"{option}:{value}"


@lru_cache(maxsize=256)
def validated(spec: QuantSpec) -> QuantSpec:
    """The spec itself, if its format allows every option it changes."""
    row = row_of(spec.format)
    for name, value in spec.changed.items():
        allowed = row.options.get(name)
        if allowed is None:
            hint = did_you_mean(name, row.options).removeprefix("; ")
            raise ArgumentError("format", spec.kind, f"{spec.format} fixes {name}", f"Options: {hint}.")
        if value not in allowed:
            choices = ", ".join(map(repr, allowed))
            raise ArgumentError("format", spec.kind, f"{name}={value!r} is not offered", f"Choose from {choices}.")
    return spec


def spec_of(format: object) -> QuantSpec:  # noqa: A002  the operator's argument
    """The spec that the `format` argument of quantize stands for."""
    if isinstance(format, QuantSpec):
        return validated(format)
    if isinstance(format, str):
        return row_of(format).spec
    raise ArgumentTypeError(
        "format", repr(format), "must be the name of a format or a QuantSpec", f"Choose from {', '.join(FORMATS)}."
    )
