"""Float64 arithmetic, against Python's own and exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from assembled import run, waves

from cdna_simulator.formats import fma64

F64 = np.float64


def put(w, index, value):
    """One float64 in every lane of a pair of registers."""
    bits = np.broadcast_to(np.asarray(value, F64), 64).view(np.uint64)
    w.v[index][...], w.v[index + 1][...] = bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)


def got(w, index):
    words = w.v[index][0].astype(np.uint64) | w.v[index + 1][0].astype(np.uint64) << np.uint64(32)
    return words.view(F64)


@pytest.mark.parametrize("near", [False, True])
def test_a_multiply_add_rounds_once(near) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(3000) * 2.0 ** rng.integers(-30, 30, 3000) for _ in range(3))
    if near:  # what the product's own rounding loses decides
        c = -(a * b) * (1 + rng.integers(-3, 4, 3000) * 2.0**-52)
    want = [float(Fraction(x) * Fraction(y) + Fraction(z)) for x, y, z in zip(a, b, c, strict=True)]
    assert fma64(a, b, c).tolist() == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_add_f64 v[4:5], v[0:1], -v[2:3]", 3.5 + 0.75),
        ("v_mul_f64 v[4:5], |v[2:3]|, v[0:1]", 3.5 * 0.75),
        ("v_fma_f64 v[4:5], v[0:1], v[2:3], 1.0", 1 - 3.5 * 0.75),
        ("v_fma_f64 v[4:5], v[0:1], 0, 0x3fe00000", 0.5),
        ("v_max_f64 v[4:5], v[0:1], v[2:3]", 3.5),
        ("v_ldexp_f64 v[4:5], v[0:1], -2", 0.875),
        ("v_rndne_f64_e32 v[4:5], v[0:1]", 4.0),
        ("v_rcp_f64_e32 v[4:5], v[2:3]", 1 / -0.75),
        ("v_frexp_mant_f64_e32 v[4:5], v[0:1]", 0.875),
        ("v_cvt_f64_f32_e32 v[4:5], 0.5", 0.5),
        ("v_cvt_f64_i32_e32 v[4:5], -7", -7.0),
        ("v_add_f64 v[4:5], v[0:1], 0.15915494309189532", 3.5 + 0.15915494309189532),
    ],
)
def test_results_that_are_float64(line, want) -> None:
    w = waves()
    put(w, 0, 3.5)
    put(w, 2, -0.75)
    run(w, line)
    assert got(w, 4).tolist() == [want] * 64


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_cvt_i32_f64_e32 v4, v[2:3]", 0xFFFFFFFD),
        ("v_cvt_u32_f64_e32 v4, v[0:1]", 0xFFFFFFFF),
        ("v_cvt_f32_f64_e32 v4, v[2:3]", 0xC0600000),
        ("v_frexp_exp_i32_f64_e32 v4, v[0:1]", 101),
    ],
)
def test_results_that_are_words(line, want) -> None:
    w = waves()
    put(w, 0, 2.0**100)
    put(w, 2, -3.5)
    run(w, line)
    assert w.v[4][0, 0] == want


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_cmp_lt_f64_e64 s[0:1], v[0:1], 2.0", [True, False, False, False]),
        ("v_cmp_nge_f64_e32 vcc, 0, v[0:1]", [True, True, True, True]),
        ("v_cmp_neq_f64_e32 vcc, v[0:1], v[0:1]", [False, False, True, False]),
        ("v_cmp_class_f64_e64 s[0:1], v[0:1], 0x203", [False, False, True, True]),  # a NaN or plus infinity
    ],
)
def test_comparisons(line, want) -> None:
    w = waves()
    put(w, 0, np.tile([1.0, 2.0, np.nan, np.inf], 16))
    run(w, line)
    at = 106 if "vcc" in line else 0
    bits = np.unpackbits(w.s[:, at : at + 2].copy().view(np.uint8), bitorder="little").astype(bool)
    assert bits.tolist() == want * 16


def test_division_as_compilers_write_it() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 64)) * 2.0 ** rng.integers(-400, 400, (2, 64))
    a[:4], b[:4] = [0.0, 1.0, np.inf, 1e-310], [3.0, 0.0, 2.0, 7.0]
    a[4:6], b[4:6] = [1e300, 1e-200], [1e-5, 1e200]
    w = waves()
    put(w, 0, a)
    put(w, 2, b)
    run(
        w,
        "v_div_scale_f64 v[4:5], s[0:1], v[2:3], v[2:3], v[0:1]",
        "v_rcp_f64_e32 v[6:7], v[4:5]",
        "v_fma_f64 v[8:9], -v[4:5], v[6:7], 1.0",
        "v_fma_f64 v[6:7], v[6:7], v[8:9], v[6:7]",
        "v_div_scale_f64 v[10:11], vcc, v[0:1], v[2:3], v[0:1]",
        "v_mul_f64 v[12:13], v[10:11], v[6:7]",
        "v_fma_f64 v[14:15], -v[4:5], v[12:13], v[10:11]",
        "v_div_fmas_f64 v[16:17], v[14:15], v[6:7], v[12:13]",
        "v_div_fixup_f64 v[18:19], v[16:17], v[2:3], v[0:1]",
    )
    with np.errstate(all="ignore"):
        assert got(w, 18).tolist() == (a / b).tolist()
