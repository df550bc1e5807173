"""Attacks on dequantize@1: bits, against readers of each format that share no code with the library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from hypothesis import strategies as st

from rlkernel_conformance.attack import attack
from rlkernel_conformance.clauses.derived_attacks import derive, leaves_inputs_untouched, storage
from rlkernel_conformance.compare import plain, require
from rlkernel_conformance.quantized_weights import (
    SCALES,
    SPECS,
    STORED,
    Weight,
    claims,
    is_nan_or_equal,
    kinds,
    of_other_layout,
    packed,
    refuses_layout,
    weights,
    with_any_codes,
)
from rlkernel_conformance.subject import Subject
from rlkernel_core.definitions import quant
from rlkernel_core.quant import QuantTensor

DTYPES: Final = ("float32", "bfloat16", "float16")  # of results


@dataclass(frozen=True)
class Codes:
    """A weight [N, K] of stored bytes: every byte, or random ones; scales by name."""

    kind: str  # of quantized.SPECS
    N: int
    K: int
    seed: int
    scales: str = "usual"
    dtype: str = "float32"  # of the result

    def weight(self, subject: Subject) -> QuantTensor:
        """The stored weight: shaped by the definition, then filled with codes and scales."""
        w = Weight(self.kind, self.N, self.K, self.seed).stored(replace(subject, device="cpu"))
        g = torch.Generator().manual_seed(self.seed)
        return with_any_codes(replace(w, dtype=getattr(torch, self.dtype)), SCALES[self.scales], g).to(subject.device)


def cases(subject: Subject) -> st.SearchStrategy[Codes]:
    """Every claimed format."""
    return st.builds(
        Codes,
        kind=kinds(subject, STORED),
        N=st.integers(1, 140),
        K=st.integers(1, 300),
        seed=st.integers(0, 2**20),
        scales=st.sampled_from(("usual", "graded", "exponents")),
    )


def check(subject: Subject, case: Codes, **given: Any) -> None:
    """The subject's bits against the format's reader, rounded once."""
    w = case.weight(subject)
    expected = quant.decode(w).to(given.get("dtype", w.dtype))
    found = subject(w, **given)
    plain(found, "weight")
    if not is_nan_or_equal(found.cpu(), expected):
        require(found.dtype == expected.dtype, f"dtype {found.dtype} instead of {expected.dtype}")
        require(found.shape == expected.shape, f"shape {list(found.shape)} instead of {list(expected.shape)}")
        mine = found.cpu()
        other = (mine != expected) | (mine.signbit() != expected.signbit())  # 0 == -0
        at = tuple((other & ~(mine.isnan() & expected.isnan())).nonzero()[0].tolist())
        require(False, f"weight{list(at)} is {mine[at].item()!r}, expected {expected[at].item()!r}")


# Every byte of codes and of 8-bit scales, every exponent of others (where a format has so many), tried first.
EVERY: Final = tuple(Codes(kind, 300, 64, 3, "exponents") for kind in SPECS)


@attack("DQ-01", lambda s: cases(s).map(lambda c: replace(c, N=6, K=512)), examples=EVERY)
def every_code_gives_the_bits_of_the_format(subject: Subject, case: Codes) -> None:
    """All 256 bytes in whole groups, under scales of every exponent, exact in fp32."""
    if claims(subject, SPECS[case.kind], STORED):
        check(subject, case)


@attack("DQ-02", lambda s: cases(s).map(lambda c: replace(c, N=min(c.N, 20))))
def other_dtypes_are_rounded_once(subject: Subject, case: Codes) -> None:
    """bf16 and fp16 of the fp32 value, asked for and by default."""
    for dtype in DTYPES[1:]:
        check(subject, case, dtype=getattr(torch, dtype))
        check(subject, replace(case, dtype=dtype))


@attack(
    "DQ-03",
    lambda s: cases(s).map(lambda c: replace(c, scales="extreme", N=min(c.N, 20))),
    examples=tuple(
        Codes(kind, 6, 256, 3, "extreme") for kind in ("int8_channel", "nf4", "mxfp4", "mxfp8", "nvfp4", "gguf_q4_k")
    ),
)
def extreme_scales_multiply_as_ieee_says(subject: Subject, case: Codes) -> None:
    """0, subnormal, largest, inf and NaN."""
    if claims(subject, SPECS[case.kind], STORED):
        check(subject, case)


@attack(
    "DQ-04",
    lambda s: cases(s).map(lambda c: replace(c, N=1 + c.N % 5, K=1 + 2 * (c.K % 40))),
    examples=(Codes("nf4", 3, 5, 0), Codes("nf4", 4, 79, 1)),
)
def codes_stand_where_the_format_says(subject: Subject, case: Codes) -> None:
    """Odd rows and odd counts, so that a row of flat storage starts inside a byte."""
    if claims(subject, SPECS[case.kind], STORED):
        check(subject, case)


@attack("DQ-05", lambda s: weights(s, STORED, rows=40))
def a_prepacked_weight_has_the_bits_of_the_canonical_one(subject: Subject, case: Weight) -> None:
    """In the layout of the backend's own prepack."""
    w = case.stored(subject)
    for other in packed(subject, w):
        for dtype in (torch.float32, torch.bfloat16):
            same = is_nan_or_equal(subject(other, dtype=dtype), subject(w, dtype=dtype))
            require(same, f"a weight in layout {other.layout} is another than the canonical one")


@attack("DQ-06", lambda s: weights(s, STORED), scale=0.2)
def a_layout_of_another_backend_is_refused(subject: Subject, case: Weight) -> None:
    """A layout id of nobody."""
    refuses_layout(subject, of_other_layout(case.stored(subject)))


@attack("DQ-07", lambda s: weights(s, STORED))
def the_weight_stays_and_results_are_their_own(subject: Subject, case: Weight) -> None:
    """Codes, scales, the generator and the defaults; two results are two tensors."""
    given = {"w": case.stored(subject)}
    leaves_inputs_untouched(subject, given)
    first, second = subject(**given), subject(**given)
    require(storage(first) != storage(second), "two results are one tensor")


derive("dequantize", lambda s, c: {"w": c.weight(s)}, determinism=cases, scale=0.5)
