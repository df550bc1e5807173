"""Scalar and vector arithmetic, one instruction at a time."""

import math
from fractions import Fraction

import numpy as np
import pytest
from assembled import floats, run, waves

from cdna_simulator import UnknownInstructionError
from cdna_simulator.formats import BF8, FP4, FP8, encode, fma, to_bf16, values

LANES = np.arange(64, dtype=np.uint32)
F32 = np.float32


@pytest.mark.parametrize(
    ("line", "a", "b", "want", "scc"),
    [
        ("s_add_u32 s2, s0, s1", 0xFFFFFFFF, 2, 1, True),
        ("s_sub_u32 s2, s0, s1", 1, 2, 0xFFFFFFFF, True),
        ("s_add_i32 s2, s0, s1", 0x7FFFFFFF, 1, 0x80000000, True),
        ("s_add_i32 s2, s0, s1", 0xFFFFFFFF, 1, 0, False),
        ("s_mul_hi_u32 s2, s0, s1", 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFE, False),
        ("s_mul_hi_i32 s2, s0, s1", 0xFFFFFFFF, 2, 0xFFFFFFFF, False),
        ("s_mul_i32 s2, s0, s1", 0x10001, 0x10000, 0x10000, False),
        ("s_ashr_i32 s2, s0, s1", 0x80000000, 31, 0xFFFFFFFF, True),
        ("s_lshr_b32 s2, s0, s1", 0x80000000, 31, 1, True),
        ("s_bfe_u32 s2, s0, s1", 0xABCD1234, (8 << 16) | 8, 0x12, True),
        ("s_bfe_i32 s2, s0, s1", 0x0000F000, (4 << 16) | 12, 0xFFFFFFFF, True),
        ("s_min_i32 s2, s0, s1", 0xFFFFFFFF, 1, 0xFFFFFFFF, True),
        ("s_max_u32 s2, s0, s1", 0xFFFFFFFF, 1, 0xFFFFFFFF, True),
        ("s_andn2_b32 s2, s0, s1", 0xF0, 0x30, 0xC0, True),
        ("s_lshl2_add_u32 s2, s0, s1", 0x40000000, 5, 5, True),
        ("s_brev_b32 s2, s0", 1, 0, 0x80000000, False),
        ("s_pack_ll_b32_b16 s2, s0, s1", 0x11112222, 0x33334444, 0x44442222, False),
        ("s_pack_lh_b32_b16 s2, s0, s1", 0x11112222, 0x33334444, 0x33332222, False),
        ("s_pack_hh_b32_b16 s2, s0, s1", 0x11112222, 0x33334444, 0x33331111, False),
        ("s_flbit_i32_b32 s2, s0", 1, 0, 31, False),
        ("s_flbit_i32 s2, s0", 0xFFFFFFFE, 0, 31, False),
        ("s_ff1_i32_b32 s2, s0", 0x50, 0, 4, False),
        ("s_abs_i32 s2, s0", 0xFFFFFFFB, 0, 5, True),
        ("s_sext_i32_i8 s2, s0", 0x80, 0, 0xFFFFFF80, False),
        ("s_movk_i32 s2, 0x8000", 0, 0, 0xFFFF8000, False),
    ],
)
def test_scalar_results_and_their_condition_bit(line, a, b, want, scc) -> None:
    w = waves()
    w.s[:, 0], w.s[:, 1] = a, b
    run(w, line)
    assert (int(w.s[0, 2]), bool(w.scc[0, 0])) == (want, scc)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("s_cmp_lt_i32 s0, s1", True),
        ("s_cmp_lt_u32 s0, s1", False),
        ("s_cmpk_gt_i32 s1, 0x1", True),
        ("s_cmp_lg_u64 s[0:1], 0", True),
        ("s_bitcmp1_b32 s0, 31", True),
    ],
)
def test_scalar_comparisons(line, want) -> None:
    w = waves()
    w.s[:, 0], w.s[:, 1] = 0xFFFFFFFF, 2
    assert bool(run(w, line).scc[0, 0]) is want


def test_exec_is_saved_narrowed_and_restored() -> None:
    w = waves()
    w.s[:, 4:6] = [[0xF, 0]]
    run(w, "s_and_saveexec_b64 s[8:9], s[4:5]", "v_mov_b32_e32 v1, 7")
    assert np.flatnonzero(w.v[1][0]).tolist() == [0, 1, 2, 3]
    run(w, "s_or_b64 exec, exec, s[8:9]", "v_mov_b32_e32 v1, 9")
    assert (w.v[1] == 9).all()


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_add3_u32 v4, v1, v2, 3", LANES + (LANES << 26) + 3),
        ("v_lshl_or_b32 v4, v1, 4, 3", (LANES << 4) | 3),
        ("v_mul_hi_u32 v4, v2, 64", LANES),
        ("v_bfe_u32 v4, v2, 26, 3", LANES & 7),
        ("v_bfe_i32 v4, v1, 0, 1", np.where(LANES & 1, 0xFFFFFFFF, 0)),
        ("v_bfi_b32 v4, 15, v1, -1", (LANES & 15) | 0xFFFFFFF0),
        ("v_alignbit_b32 v4, v1, v2, 26", ((LANES.astype(np.uint64) << 6) & 0xFFFFFFFF) | LANES),
        ("v_perm_b32 v4, v1, v2, 0x0c0c0403", (LANES << 8) | (LANES >> 0 << 26 >> 24 & 0xFF)),
        ("v_bfrev_b32_e32 v4, v2", np.array([int(f"{int(x) << 26 & 0xFFFFFFFF:032b}"[::-1], 2) for x in LANES])),
        ("v_ffbh_u32_e32 v4, v1", np.array([32 - int(x).bit_length() if x else 0xFFFFFFFF for x in LANES])),
        ("v_ffbh_i32_e32 v4, v3", np.array([32 - int(x).bit_length() if x else 0xFFFFFFFF for x in LANES])),
        ("v_sub_u32_e64 v4, v1, 5 clamp", np.maximum(LANES.astype(int) - 5, 0)),
        ("v_xad_u32 v4, v1, 3, 1", (LANES ^ 3) + 1),
        ("v_med3_u32 v4, v1, 10, 20", LANES.clip(10, 20)),
        ("v_mbcnt_lo_u32_b32 v4, -1, 0", np.minimum(LANES, 32)),
        ("v_mbcnt_hi_u32_b32 v4, -1, 0", np.maximum(LANES.astype(int) - 32, 0)),
        ("v_bitop3_b32 v4, v1, v2, 5 bitop3:0x96", LANES ^ (LANES << 26) ^ 5),
        ("v_and_b32_sdwa v4, v2, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_3 src1_sel:DWORD",
         (LANES << 26 >> 24 & 0xFF) & LANES),
    ],
)  # fmt: skip
def test_integer_lanes(line, want) -> None:
    w = waves()
    w.v[1][...], w.v[2][...], w.v[3][...] = LANES, LANES << 26, ~LANES
    run(w, line)
    assert w.v[4][0].tolist() == np.asarray(want).astype(np.uint32).tolist()


def test_a_sum_of_64_bits_carries() -> None:
    w = waves()
    w.v[1][...], w.v[2][...] = 0xFFFFFFFF, 1
    run(w, "v_add_co_u32_e32 v4, vcc, v1, v2", "v_addc_co_u32_e32 v5, vcc, v1, v2, vcc")
    assert (set(w.v[4][0]), set(w.v[5][0])) == ({0}, {1})
    run(w, "v_mad_u64_u32 v[6:7], s[0:1], v1, v1, 0")
    assert (set(w.v[6][0]), set(w.v[7][0])) == ({1}, {0xFFFFFFFE})


def test_a_sum_with_a_carry_takes_the_bytes_that_sdwa_names() -> None:
    w = waves()
    w.v[0][...], w.v[1][...] = 0xFFFFFF80, 0x80123456
    run(w, "v_add_co_u32_sdwa v2, vcc, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_3")
    assert (w.v[2][0, 0], w.s[0, 106]) == (0, 0xFFFFFFFF)


def test_the_size_of_a_half_that_sdwa_names() -> None:
    w = waves()
    w.v[1][...] = 0xC2003C00  # -3 and 1
    run(w, "v_cvt_f32_f16_sdwa v4, |v1| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1")
    assert floats(w, 4)[0].tolist() == [3.0] * 64


def test_a_sum_of_floats_goes_to_the_byte_that_sdwa_names() -> None:
    """Adding 2^23 leaves a whole number in the low bits of a float: quantizers store it so."""
    w = waves()
    w.v[1][...], w.v[2][...] = np.float32(2**23).view(np.uint32), (LANES.astype(np.float32)).view(np.uint32)
    w.v[4][...] = w.v[5][...] = 0x11223344
    selected = "dst_sel:BYTE_3 dst_unused:{} src0_sel:DWORD src1_sel:DWORD"
    run(w, f"v_add_f32_sdwa v4, v1, v2 {selected.format('UNUSED_PAD')}")
    run(w, f"v_add_f32_sdwa v5, v1, v2 {selected.format('UNUSED_PRESERVE')}")
    assert w.v[4][0].tolist() == (LANES << 24).tolist()
    assert w.v[5][0].tolist() == (LANES << 24 | 0x223344).tolist()


def test_a_comparison_of_halves_takes_those_that_sdwa_names() -> None:
    w = waves()
    w.v[0][...], w.v[1][...] = 0x7E00_3C00, 0xBC00_4000  # (1, NaN) and (2, -1), low half first
    run(w, "v_cmp_o_f16_sdwa s[0:1], v0, v0 src0_sel:WORD_1 src1_sel:WORD_1")
    run(w, "v_cmp_eq_f16_sdwa s[2:3], v0, |v1| src0_sel:WORD_0 src1_sel:WORD_1")
    assert w.s[0, 0:4].tolist() == [0, 0, 0xFFFFFFFF, 0xFFFFFFFF]


def test_small_integers_become_halves() -> None:
    w = waves()
    w.v[0][...] = 0x1234_00FE
    run(w, "v_cvt_f16_i16_sdwa v1, sext(v0) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0")
    run(w, "v_cvt_f16_u16_e32 v2, v0")
    assert [w.v[i][0, 0] for i in (1, 2)] == [0xC000, 0x5BF0]


def test_a_shift_of_halves_keeps_the_sign() -> None:
    w = waves()
    w.v[0][...], w.v[1][...] = 0xFF13, 0x8000_7000
    run(w, "v_ashrrev_i16_sdwa v2, v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:WORD_1")
    assert w.v[2][0, 0] == 0xF000


def test_signs_bars_and_output_modifiers() -> None:
    w = waves()
    w.v[1].view(F32)[...] = -3
    run(w, "v_add_f32_e64 v4, |v1|, -v1 mul:2", "v_mul_f32_e64 v5, v1, v1 clamp")
    assert (set(floats(w, 4)[0]), set(floats(w, 5)[0])) == ({12.0}, {1.0})


def test_signs_and_bars_of_halves_are_heeded_and_those_of_bits_refused() -> None:
    w = waves()
    w.v[1][...] = np.array([np.float16(3), np.float16(0.5)]).view(np.uint32)
    run(w, "v_cvt_f32_f16_e64 v4, -v1", "v_cvt_f32_f16_sdwa v5, v1 src0_sel:WORD_1")
    run(w, "v_cndmask_b32_e64 v6, v4, -v4, s[0:1]", "v_cvt_f32_f16_e64 v7, -|v1|")
    assert [floats(w, i)[0, 0] for i in (4, 5, 6, 7)] == [-3.0, 0.5, -3.0, -3.0]
    with pytest.raises(UnknownInstructionError, match="sign or bars"):
        run(w, "v_add_u32_e64 v4, -v1, v2")


def test_a_multiply_add_mixes_floats_and_halves() -> None:
    w = waves()
    w.v[1][...] = np.array([np.float16(3), np.float16(0.5)]).view(np.uint32)
    w.v[2].view(F32)[...] = 10
    run(
        w,
        "v_fma_mix_f32 v4, v1, v2, v2 op_sel_hi:[1,0,0]",
        "v_fma_mix_f32 v5, v1, v2, neg(0) op_sel:[1,0,0] op_sel_hi:[1,0,1]",
        "v_fma_mix_f32 v6, -v1, 1.0, |v1| op_sel:[1,0,0] op_sel_hi:[1,1,1]",
        "v_fma_mixlo_f16 v7, v1, v2, neg(0) op_sel_hi:[1,0,1]",
        "v_fma_mixhi_f16 v7, v1, v2, 0 op_sel:[1,0,0] op_sel_hi:[1,0,1]",
    )
    assert w.v[7][0, :1].view(np.float16).tolist() == [30.0, 5.0]
    assert [floats(w, i)[0, 0] for i in (4, 5, 6)] == [40.0, 5.0, 2.5]


@pytest.mark.parametrize("seed", range(3))
def test_a_multiply_add_rounds_once(seed) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (3, 1000), dtype=np.uint32)
    a, b, c = bits.view(F32)
    with np.errstate(all="ignore"):
        c = np.where(rng.random(1000) < 0.5, c, -a * b)  # sums that cancel show the product's lower half
        usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
        got = fma(a, b, c)[usable]
    for x, y, z, g in zip(a[usable], b[usable], c[usable], got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        if abs(exact) < 2**127:
            spacing = Fraction(float(np.spacing(np.abs(g))))
            assert abs(Fraction(float(g)) - exact) <= spacing / 2


def test_a_sum_exactly_between_two_floats_is_rounded_by_what_lies_below() -> None:
    one, tiny = F32(1), F32(2**-30)
    a = np.array([one + F32(2**-23)] * 2)
    b = np.array([one + F32(2**-12)] * 2)
    c = np.array([tiny, -tiny])
    exact = a.astype(np.longdouble) * b + c
    assert fma(a, b, c).tolist() == exact.astype(F32).tolist()


def test_exact_division_as_compilers_write_it() -> None:
    """The sequence that LLVM emits for a / b gives the rounded quotient, where it is tiny, too."""
    w = waves()
    rng = np.random.default_rng(0)
    a = np.ldexp(rng.standard_normal(64), rng.integers(-120, 120, 64)).astype(F32)
    b = np.ldexp(rng.standard_normal(64), rng.integers(-120, 120, 64)).astype(F32)
    a[:4], b[:4] = [0, 1, np.inf, 1], [1, 0, 2, np.nan]
    a[4:8], b[4:8] = 2.0, [1.7e38, 3.3e38, -2.5e38, np.inf]  # of which reciprocal and quotient are denormal
    w.v[1].view(F32)[...], w.v[2].view(F32)[...] = a, b
    run(
        w,
        "v_div_scale_f32 v4, s[0:1], v2, v2, v1",
        "v_rcp_f32_e32 v5, v4",
        "v_fma_f32 v6, -v4, v5, 1.0",
        "v_fmac_f32_e32 v5, v6, v5",
        "v_div_scale_f32 v6, vcc, v1, v2, v1",
        "v_mul_f32_e32 v7, v6, v5",
        "v_fma_f32 v8, -v4, v7, v6",
        "v_fmac_f32_e32 v7, v8, v5",
        "v_fma_f32 v4, -v4, v7, v6",
        "v_div_fmas_f32 v4, v4, v5, v7",
        "v_div_fixup_f32 v4, v4, v2, v1",
    )
    with np.errstate(all="ignore"):
        want = (a.astype(np.float64) / b).astype(F32)
    np.testing.assert_array_equal(floats(w, 4)[0], want)


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_cmp_lt_i32_e64 s[0:1], v1, 0", lambda x: x.view(np.int32) < 0),
        ("v_cmp_gt_u32_e64 s[0:1], v1, 7", lambda x: x > 7),
        ("v_cmp_u_f32_e64 s[0:1], v1, v1", lambda x: np.isnan(x.view(F32))),
        ("v_cmp_ngt_f32_e64 s[0:1], v1, 0", lambda x: ~(x.view(F32) > 0)),
        ("v_cmp_o_f16_e64 s[0:1], v1, v1", lambda x: ~np.isnan(x.astype(np.uint16).view(np.float16))),
        ("v_cmp_class_f32_e64 s[0:1], v1, 0x204", lambda x: np.isinf(x.view(F32))),
        ("v_cmp_class_f16_e64 s[0:1], v1, 3", lambda x: np.isnan(x.astype(np.uint16).view(np.float16))),
        ("v_cmp_class_f16_e64 s[0:1], v1, 0x90", lambda x: ((x & 0x7C00) == 0) & ((x & 0x3FF) > 0)),  # denormals
        ("v_cmp_eq_u16_sdwa s[0:1], v1, v1 src0_sel:WORD_0 src1_sel:WORD_1", lambda x: (x & 0xFFFF) == x >> 16),
    ],
)
def test_comparisons_write_a_bit_for_every_active_lane(line, want) -> None:
    w = waves()
    x = np.resize(
        np.array([0, 5, 8, 0x80000001, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F803F80, 0x7F01], np.uint32), 64
    )
    w.v[1][...] = x
    run(w, "s_mov_b64 exec, 0xffff", line)
    bits = np.unpackbits(w.s[:, 0:2].copy().view(np.uint8), bitorder="little").astype(bool)
    assert bits.tolist() == (want(x) & (LANES < 16)).tolist()


@pytest.mark.parametrize(
    ("arch", "codes"),
    [("gfx942", {1.0: 0x40, 240.0: 0x7F, -0.0: 0x00, 300.0: 0x80}), ("gfx950", {1.0: 0x38, 448.0: 0x7E, 600.0: 0x7F})],
)
def test_conversion_to_fp8_has_the_flavour_of_the_architecture(arch, codes) -> None:
    for value, code in codes.items():
        w = waves(arch)
        w.v[1].view(F32)[...] = value
        run(w, "v_cvt_pk_fp8_f32 v4, v1, v1 op_sel:[0,0,1]")
        assert w.v[4][0, 0] == code << 24 | code << 16
        run(w, "v_cvt_pk_f32_fp8_sdwa v[6:7], v4 src0_sel:WORD_1")
        back = floats(w, 6)[0, 0]
        assert back == value or (math.isnan(back) and value in {300.0, 600.0}) or value == 0


@pytest.mark.parametrize("form", [*FP8.values(), *BF8.values(), FP4])
def test_every_code_of_a_small_format_survives_a_round_trip(form) -> None:
    codes = np.arange(1 << form.bits)
    table = values(form)
    finite = np.isfinite(table)
    assert encode(table[finite], form, saturate=True).tolist() == codes[finite].tolist()


@pytest.mark.parametrize(("fnuz", "name"), [(True, "float8_e4m3fnuz"), (False, "float8_e4m3fn")])
def test_rounding_to_fp8_agrees_with_torch(fnuz, name) -> None:
    torch = pytest.importorskip("torch")
    x = (torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 60).clamp(-240, 240)
    want = x.to(getattr(torch, name)).view(torch.uint8).tolist()
    assert encode(x.numpy(), FP8[fnuz], saturate=True).tolist() == want


def test_rounding_to_bf16_agrees_with_torch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0))
    assert to_bf16(x.numpy()).tolist() == [b & 0xFFFF for b in x.bfloat16().view(torch.int16).tolist()]


def test_pairs_take_the_halves_that_their_modifiers_name() -> None:
    w = waves()
    for i, x in enumerate((1, 2, 10, 20)):
        w.v[i].view(F32)[...] = x
    run(
        w,
        "v_pk_add_f32 v[4:5], v[0:1], v[2:3]",
        "v_pk_mul_f32 v[6:7], v[0:1], v[2:3] op_sel:[1,0] op_sel_hi:[0,1]",
        "v_pk_fma_f32 v[8:9], v[0:1], v[2:3], v[2:3] neg_lo:[1,0,0] neg_hi:[0,0,1]",
        "v_pk_mov_b32 v[10:11], v[0:1], v[2:3] op_sel:[1,0]",
    )
    assert [floats(w, i)[0, 0] for i in range(4, 12)] == [11, 22, 20, 20, 0, 20, 2, 10]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ("v_pk_sub_u16 v2, v0, v1", 0xFFFF_0003),
        ("v_pk_sub_u16 v2, v0, v1 clamp", 0x0000_0003),
        ("v_pk_sub_u16 v2, v0, 2 clamp", 0x0001_0003),  # a constant has nothing in its high half
        ("v_pk_add_u16 v2, v0, v0 op_sel_hi:[0,0]", 0x000A_000A),
        ("v_pk_lshlrev_b16 v2, 4, v0 op_sel_hi:[0,1]", 0x0010_0050),
        ("v_pk_lshrrev_b16 v2, 1, v0 op_sel_hi:[0,1]", 0x0000_0002),
    ],
)
def test_pairs_of_16_bits_wrap_or_stop(line, want) -> None:
    w = waves()
    w.v[0][...], w.v[1][...] = 0x0001_0005, 0x0002_0002
    run(w, line)
    assert int(w.v[2][0, 0]) == want


def test_the_largest_of_three_halves_is_nan_where_one_is() -> None:
    w = waves()
    pairs = np.array([[1, -2], [np.nan, 3]], np.float16).view(np.uint32)
    w.v[0][...], w.v[1][...] = pairs[0, 0], pairs[1, 0]
    run(w, "v_pk_maximum3_f16 v2, v0, 0, 0", "v_pk_maximum3_f16 v3, v0, v1, 0")
    found = np.array([w.v[2][0, 0], w.v[3][0, 0]], np.uint32).view(np.float16)
    assert [str(x) for x in found] == ["1.0", "0.0", "nan", "3.0"]


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize(
    ("name", "operands", "want"),
    [
        ("max3", (1, -2, 3), "3.0"),
        ("max3", (np.nan, -2, np.nan), "-2.0"),
        ("max3", (np.nan, np.nan, np.nan), "nan"),
        ("max3", (-0.0, 0.0, -0.0), "0.0"),
        ("max3", (0.0, -0.0, -5), "0.0"),
        ("max3", (-0.0, -0.0, -5), "-0.0"),
        ("min3", (1, -2, 3), "-2.0"),
        ("min3", (np.nan, np.nan, 3), "3.0"),
        ("min3", (0.0, -0.0, 0.0), "-0.0"),
        ("min3", (-0.0, 0.0, 5), "-0.0"),
        ("min3", (0.0, 0.0, 5), "0.0"),
        ("med3", (3, -2, 1), "1.0"),
        ("med3", (2, 5, 5), "5.0"),
        ("med3", (1, 2, np.nan), "1.0"),
        ("med3", (np.nan, 2, 1), "1.0"),
        ("med3", (-0.0, 0.0, 5), "0.0"),
        ("med3", (0.0, -0.0, -5), "-0.0"),
        ("med3", (-0.0, 0.0, -5), "0.0"),
    ],
)
def test_of_three_floats_a_nan_is_left_out_and_zeros_are_ordered_by_sign(kind, name, operands, want) -> None:
    w = waves()
    for i, x in enumerate(operands):
        w.v[i][...] = np.array(x, kind).view({2: np.uint16, 4: np.uint32}[kind().nbytes])
    run(w, f"v_{name}_{'f16' if kind is np.float16 else 'f32'} v3, v0, v1, v2")
    assert want == str(w.v[3][0, :1].view(kind)[0])


def test_of_three_halves_the_bars_come_first() -> None:
    w = waves()
    w.v[0][...], w.v[1][...] = (np.array(x, np.float16).view(np.uint16) for x in (-3, 2))
    run(w, "v_max3_f16 v2, |v0|, 0, |v1|", "v_min3_f16 v3, -v0, 1.0, v1")
    assert [str(w.v[i][0, :1].view(np.float16)[0]) for i in (2, 3)] == ["3.0", "1.0"]


@pytest.mark.parametrize(
    "line", ["v_frobnicate_b32 v0, v1", "s_frobnicate s0, s1", "v_add_u32_e64 v0, v1, v2 banana:1"]
)
def test_an_instruction_that_nobody_knows_is_named(line) -> None:
    with pytest.raises(UnknownInstructionError, match=line.split()[0].removesuffix("_e64")):
        run(waves(), line)
