"""Weights, formats and layouts for attacks on the operators of quantized weights.

Legend: N rows (outputs) · K columns (inputs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Generator, Tensor

import rlkernel
from rlkernel_conformance.compare import Violation
from rlkernel_conformance.subject import Subject
from rlkernel_core.errors import LayoutError
from rlkernel_core.quant import FORMATS, QuantSpec, QuantTensor, quantize

_named = QuantSpec.named
_FP8: Final = ("e5m2", "e4m3fnuz", "e5m2fnuz")
# kind -> spec; one family of meanings after the other, so that a draw takes a family first.
FAMILIES: Final[Mapping[str, tuple[QuantSpec, ...]]] = {
    "integers": (
        *(_named(f) for f in FORMATS if f.startswith("int4") and not f.endswith("asym")),
        *(_named("q4l"), _named("gguf_q4_0"), _named("int4_g32", act_order=True)),
        _named("int4_g64", scale_rule="absmax/7"),
        _named("int4_g32", scale_dtype="float16"),
    ),
    "asymmetric": (
        *(_named(f) for f in FORMATS if f.endswith("asym")),
        _named("int4_g32_asym", scale_dtype="float32"),
        _named("int4_g64_asym", act_order=True),
    ),
    "float zero": (
        *(
            _named("hqq4"),
            _named("hqq4", scale_dtype="bfloat16"),
            *(_named(f"hqq4_g{g}") for g in (32, 128)),
        ),
    ),
    "tables": (
        *(_named(f, double_quant=d) for f in ("nf4", "fp4") for d in (False, True)),
        *(_named(f"{f}_g128") for f in ("nf4", "fp4")),
    ),
    "powers of two": (
        *(_named(f) for f in ("mxfp4", "mxfp8")),
        *(_named("mxfp4", scale_rule="rceil"), _named("mxfp8", scale_rule="even")),
        *(_named("mxfp8", element="e5m2"), _named("mxfp4", rounding="away")),
    ),
    "two scales": (
        _named("nvfp4"),
        *(_named(f"gguf_q{bits}_k") for bits in (4, 5, 6)),
    ),
    "int8": (
        *(_named("int8_channel"), _named("int8_w8a8"), _named("gguf_q8_0")),
        *(_named("int8_channel", scale_dtype=d) for d in ("float16", "bfloat16")),
    ),
    "fp8": (
        *(_named(f) for f in FORMATS if f.startswith("fp8")),
        _named("fp8_block128", scale_rule="absmax/max_pow2"),
        *(_named("fp8_channel", element=e) for e in _FP8),
    ),
    "fp8 with fp8 x": (
        _named("fp8_channel", act="token_fp8"),
        _named("fp8_tensor", act="token_fp8", element="e4m3fnuz"),
        _named("fp8_block128", act="block128_fp8"),
    ),
    "small blocks of x": (
        *(_named("mxfp8", act="mxfp8"), _named("mxfp8", act="mxfp8", scale_rule="rceil", element="e5m2")),
        *(_named("mxfp4", act="mxfp8"), _named("nvfp4", act="nvfp4")),
    ),
}
SPECS: Final[Mapping[str, QuantSpec]] = {s.kind: s for family in FAMILIES.values() for s in family}

# Of these an operator takes note; see rlkernel_core.spec.quantize and .qmatmul.
STORED: Final = ("element", "scale_dtype", "double_quant", "act_order")
SCALE_RULES: Final = (*STORED, "scale_rule", "rounding")
MULTIPLIED: Final = (*STORED, "act")


def kinds(
    subject: Subject, options: tuple[str, ...], where: Callable[[QuantSpec], bool] = lambda _: True
) -> st.SearchStrategy[str]:
    """Kinds of the formats that the subject claims, drawn by family; nothing where it claims none of them."""
    families = ([s.kind for s in family if where(s) and claims(subject, s, options)] for family in FAMILIES.values())
    return st.one_of([st.sampled_from(family) for family in families if family])


def claims(subject: Subject, spec: QuantSpec, options: tuple[str, ...]) -> bool:
    """Some implementation of the subject takes this format; how x is quantized matters where `options` say so."""
    other = "act" not in options and "act" in spec.changed  # then it is the same as without
    return not other and any(spec.features(*options) <= i.supports for i in subject.impls)


def _noise(n: int, k: int, g: Generator) -> Tensor:
    return torch.randn(n, k, generator=g, dtype=torch.float64)


def _outliers(n: int, k: int, g: Generator) -> Tensor:
    x = _noise(n, k, g)
    x[torch.arange(n), torch.randint(k, (n,), generator=g)] *= 100
    return x


def _ties(n: int, k: int, g: Generator) -> Tensor:
    """Multiples of 1/2 in groups of 32 that reach 7.5: half of them are as near to one code as to another."""
    x = torch.randint(-15, 16, (n, k), generator=g).double() / 2
    x[:, ::32] = 7.5
    return x


def _graded(n: int, k: int, g: Generator) -> Tensor:
    return _noise(n, k, g) * torch.exp2(torch.arange(n).remainder(9) - 4.0).unsqueeze(1)


def _sparse(n: int, k: int, g: Generator) -> Tensor:
    return torch.where(torch.rand(n, k, generator=g) < 0.9, 0.0, _noise(n, k, g))


WEIGHTS: Final[Mapping[str, Callable[[int, int, Generator], Tensor]]] = {
    "normal": _noise,
    "graded": _graded,  # a row with the scale of another shows
    "offset": lambda n, k, g: _noise(n, k, g) + 3,
    "outliers": _outliers,
    "ties": _ties,
    "one_sided": lambda n, k, g: _noise(n, k, g).abs(),
    "equal": lambda n, k, g: _noise(n, 1, g).expand(n, k),
    "sparse": _sparse,
    "small": lambda n, k, g: _noise(n, k, g) * 2.0**-40,
}


@dataclass(frozen=True)
class Weight:
    """A weight [N, K] of a named distribution, in a format."""

    kind: str  # of SPECS
    N: int
    K: int
    seed: int
    values: str = "normal"
    dtype: str = "float32"

    @property
    def spec(self) -> QuantSpec:
        """The format."""
        return SPECS[self.kind]

    def full(self, subject: Subject) -> Tensor:
        """The weight itself."""
        g = torch.Generator().manual_seed(self.seed)
        return WEIGHTS[self.values](self.N, self.K, g).to(getattr(torch, self.dtype)).to(subject.device)

    def stored(self, subject: Subject) -> QuantTensor:
        """The weight in its format, quantized by the definition."""
        return quantize(self.full(subject), self.spec)


# One weight of every format, for the accuracy clauses to try before they draw.
EVERY: Final = tuple(Weight(kind, 4, 256, 7, "graded") for kind in SPECS)


def weights(
    subject: Subject,
    options: tuple[str, ...],
    *,
    rows: int = 20,
    columns: int = 300,
    where: Callable[[QuantSpec], bool] = lambda _: True,
    dtypes: tuple[str, ...] = ("float32",),
) -> st.SearchStrategy[Weight]:
    """Weights of every claimed format and every distribution."""
    return st.builds(
        Weight,
        kind=kinds(subject, options, where),
        N=st.integers(1, rows),
        K=st.integers(1, columns),
        seed=st.integers(0, 2**20),
        values=st.sampled_from(list(WEIGHTS)),
        dtype=st.sampled_from(dtypes),
    )


def of_other_layout(w: QuantTensor) -> QuantTensor:
    """The same weight under a layout id that belongs to nobody."""
    return replace(w, layout="somebody_else_s_tiles", parts={name: x.clone() for name, x in w.parts.items()})


def refuses_layout(subject: Subject, *args: Any, **kwargs: Any) -> None:
    """The call raises LayoutError."""
    try:
        subject(*args, **kwargs)
    except LayoutError:
        return
    raise Violation("a layout of another backend is read")


def packed(subject: Subject, w: QuantTensor) -> Iterator[QuantTensor]:
    """The weight as the subject's own prepack arranges it; nothing where it has none, or none for this shape."""
    backend = Subject(subject.backend, "prepack", subject.device)
    if any(w.spec.features(*STORED) <= i.supports for i in backend.impls):
        try:
            yield rlkernel.prepack(w)
        except rlkernel.ArgumentError:
            return


def is_nan_or_equal(found: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit; any NaN equals any other, since its payload is no part of a value."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if expected.is_floating_point() and expected.element_size() == 1:
        found, expected = found.float(), expected.float()  # exact, and no two bytes of numbers become one
    nan = expected.isnan()
    a, b = (x.masked_fill(nan, 0).contiguous().view(torch.uint8) for x in (found, expected))
    return torch.equal(nan, found.isnan()) and torch.equal(a, b)


_BYTES: Final = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# 0, subnormals, the smallest normal, large, the largest of bfloat16 and fp32; and what is not finite
EXTREMES: Final = (0.0, 1e-45, 3e-39, 1.1754944e-38, 6e-8, 1 / 3, 771.5, 6.5e4, 3e38, 3.4e38, torch.inf, torch.nan)
SCALES: Final[dict[str, Callable[[Tensor, torch.Generator], Tensor]]] = {
    "usual": lambda x, g: torch.rand(x.shape, generator=g) * 0.1,
    "graded": lambda x, g: torch.exp2(torch.arange(x.numel()).remainder(13) - 9.0).view(x.shape),
    "exponents": lambda x, g: torch.exp2((torch.arange(x.numel()) % 277 - 149.0).double()).to(x.dtype).view(x.shape),
    "extreme": lambda x, g: torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), x.shape, generator=g)],
}


def with_any_codes(w: QuantTensor, scales: Callable[[Tensor, Generator], Tensor], g: Generator) -> QuantTensor:
    """A weight on the CPU, filled with other stored bytes: every byte where there is room for all, or random ones."""
    for name, part in w.parts.items():
        raw = part.view(torch.uint8).view(-1)
        bytes_ = name == "codes" or (part.element_size() == 1 and name != "zero")
        if bytes_ and raw.numel() >= 256:
            raw.copy_(_BYTES[torch.arange(raw.numel()).remainder(256)])
        elif name == "g_idx":
            part.copy_(part[torch.randperm(part.numel(), generator=g)])
        elif name == "codes" or part.element_size() == 1:
            high = 17 if name == "zero" else 256  # zero-points of 16 are written by other quantizers
            raw.copy_(torch.randint(high, raw.shape, generator=g).to(torch.uint8))
        elif name == "zero":
            part.copy_(torch.rand(part.shape, generator=g) * 15)
        elif "table" not in name:
            part.copy_(scales(part, g))
    return w
