"""Values that move: between lanes, to and from LDS and global memory, through matrix instructions."""

import numpy as np
import pytest
from assembled import floats, run, waves

from cdna_simulator import GlobalMemory, OutOfBoundsError, Region, UnknownInstructionError
from cdna_simulator.formats import FP4, FP8, values

LANES = np.arange(64, dtype=np.uint32)
F32 = np.float32


def moved(modifiers, count=1):
    w = waves(count=count)
    w.v[1][...] = LANES + 100
    w.v[4][...] = 7
    return run(w, f"v_mov_b32_dpp v4, v1 {modifiers}").v[4][0]


@pytest.mark.parametrize(
    ("modifiers", "want"),
    [
        ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", (LANES ^ 1) + 100),
        ("row_shr:1 row_mask:0xf bank_mask:0xf", np.where(LANES % 16 >= 1, LANES + 99, 7)),
        ("row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1", np.where(LANES % 16 >= 1, LANES + 99, 0)),
        ("row_shl:2 row_mask:0xf bank_mask:0xf bound_ctrl:1", np.where(LANES % 16 < 14, LANES + 102, 0)),
        ("row_ror:4 row_mask:0xf bank_mask:0xf", LANES // 16 * 16 + (LANES - 4) % 16 + 100),
        ("row_bcast:15 row_mask:0xa bank_mask:0xf", np.where(LANES // 16 % 2, LANES // 16 * 16 + 99, 7)),
        ("row_bcast:31 row_mask:0xc bank_mask:0xf", np.where(LANES >= 32, 131, 7)),
        ("row_half_mirror row_mask:0xf bank_mask:0xf", LANES // 8 * 8 + 7 - LANES % 8 + 100),
        ("row_mirror row_mask:0xf bank_mask:0x3", np.where(LANES % 16 < 8, LANES // 16 * 16 + 115 - LANES % 16, 7)),
        ("wave_shl:1 row_mask:0xf bank_mask:0xf", np.where(LANES < 63, LANES + 101, 7)),
    ],
)
def test_dpp_reads_the_lane_it_names(modifiers, want) -> None:
    assert moved(modifiers).tolist() == want.tolist()


def test_dpp_does_not_read_an_inactive_lane() -> None:
    w = waves()
    w.v[1][...] = LANES + 100
    run(w, "s_mov_b64 exec, 2", "v_mov_b32_dpp v4, v1 row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1")
    assert w.v[4][0, :3].tolist() == [0, 0, 0]


def test_lanes_exchange_blocks() -> None:
    w = waves("gfx950")
    w.v[1][...], w.v[2][...] = LANES, LANES + 100
    run(w, "v_permlane32_swap_b32_e32 v1, v2")
    assert w.v[1][0].tolist() == [*range(32), *range(100, 132)]
    assert w.v[2][0].tolist() == [*range(32, 64), *range(132, 164)]
    w.v[1][...], w.v[2][...] = LANES, LANES + 100
    run(w, "v_permlane16_swap_b32_e32 v1, v2")
    assert w.v[1][0].tolist() == [*range(16), *range(100, 116), *range(32, 48), *range(132, 148)]


def test_lanes_pull_and_push_through_addresses() -> None:
    w = waves()
    w.v[1][...], w.v[2][...] = (63 - LANES) * 4, LANES + 100
    run(w, "ds_bpermute_b32 v4, v1, v2", "ds_permute_b32 v5, v1, v2")
    assert w.v[4][0].tolist() == w.v[5][0].tolist() == (163 - LANES).tolist()


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("SWAP,16", LANES ^ 16),
        ("REVERSE,8", LANES // 8 * 8 + 7 - LANES % 8),
        ("BROADCAST,4,1", LANES // 4 * 4 + 1),
        ("QUAD_PERM,3,2,1,0", LANES // 4 * 4 + 3 - LANES % 4),
        ('BITMASK_PERM,"01pip"', LANES & 32 | 8 | (LANES & 5) | (2 - (LANES & 2))),
    ],
)
def test_lanes_swizzle_within_halves_of_a_wave(pattern, want) -> None:
    w = waves()
    w.v[1][...] = LANES
    run(w, f"ds_swizzle_b32 v2, v1 offset:swizzle({pattern})")
    assert w.v[2][0].tolist() == want.tolist()


def test_a_swizzle_that_nobody_knows_is_named() -> None:
    with pytest.raises(UnknownInstructionError, match="ROTATE"):
        run(waves(), "ds_swizzle_b32 v2, v1 offset:swizzle(ROTATE,1)")


def test_one_lane_is_read_and_written() -> None:
    w = waves(count=2)
    w.v[1][...] = LANES + np.array([[0], [1000]], np.uint32)
    run(
        w,
        "s_mov_b64 exec, 0xf0",
        "v_readfirstlane_b32 s0, v1",
        "v_readlane_b32 s1, v1, 9",
        "v_writelane_b32 v1, s1, 63",
    )
    assert w.s[:, 0].tolist() == [4, 1004]
    assert w.s[:, 1].tolist() == [9, 1009]
    assert w.v[1][:, 63].tolist() == [9, 1009]


def test_lds_is_a_workgroup_s_own_and_bounded() -> None:
    w = waves(count=2, lds=512)
    w.v[1][...], w.v[2][...] = LANES * 4, LANES + np.array([[0], [1000]], np.uint32)
    run(w, "ds_write_b32 v1, v2 offset:256", "ds_read_b32 v4, v1 offset:256")
    assert w.v[4].tolist() == w.v[2].tolist()
    with pytest.raises(OutOfBoundsError, match="512 bytes of LDS"):
        run(w, "ds_write_b64 v1, v[2:3] offset:256")


def test_scratch_is_a_lane_s_own_and_bounded() -> None:
    w = waves(count=2, scratch=24)
    w.v[1][...], w.v[2][...], w.v[3][...] = LANES, LANES + np.array([[0], [1000]], np.uint32), 8
    run(w, "scratch_store_dwordx2 off, v[1:2], off offset:16", "scratch_store_dword v3, v2, off offset:4")
    run(w, "scratch_load_dwordx2 v[4:5], off, off offset:16", "scratch_load_dword v6, off, off offset:12")
    assert [w.v[n].tolist() for n in (4, 5, 6)] == [w.v[n].tolist() for n in (1, 2, 2)]
    with pytest.raises(OutOfBoundsError, match="4 bytes at 24 of 24 bytes of scratch"):
        run(w, "scratch_load_dword v6, v3, off offset:16")


def test_lds_addresses_have_32_bits() -> None:
    w = waves(lds=512)
    w.v[1][...], w.v[2][...] = LANES * 4 - 44, LANES
    run(w, "ds_write_b32 v1, v2 offset:44", "ds_read_b32 v4, v1 offset:44")
    assert w.v[4].tolist() == w.v[2].tolist()


def test_lds_moves_bytes_halves_and_pairs() -> None:
    w = waves()
    w.v[1][...], w.v[2][...], w.v[3][...] = LANES * 8, 0x8182 + LANES, 5
    run(w, "ds_write2_b32 v1, v2, v3 offset1:1", "ds_read_i8 v4, v1 offset:1", "ds_read_u16 v5, v1")
    assert (w.v[4][0] == 0xFFFFFF81).all()
    assert w.v[5][0].tolist() == (0x8182 + LANES).tolist()
    run(w, "ds_read_u16_d16_hi v5, v1 offset:4", "ds_read2_b32 v[6:7], v1 offset0:1 offset1:0")
    assert w.v[5][0].tolist() == (0x58182 + LANES).tolist()
    assert w.v[6][0].tolist() == [5] * 64


def test_a_transposed_read_gives_columns() -> None:
    w = waves("gfx950")
    w.lds.data.view(np.uint16)[:256] = np.arange(256)
    w.v[1][...] = LANES * 8
    run(w, "ds_read_b64_tr_b16 v[4:5], v1")
    got = np.stack([w.v[4][0], w.v[5][0]], 1).view(np.uint16)  # lane l holds column l % 16 of 4 rows of 16
    assert got[:16].tolist() == np.arange(64).reshape(4, 16).T.tolist()


def test_a_transposed_read_leaves_waves_that_stand_elsewhere() -> None:
    w = waves("gfx950", count=2)
    w.v[1][...], w.v[4][...] = LANES * 8, 7
    w.select(np.array([[True], [False]]))
    run(w, "ds_read_b64_tr_b16 v[4:5], v1")
    assert [bool((wave == 7).any()) for wave in w.v[4]] == [False, True]


def test_a_transposed_read_with_lanes_off_is_not_modeled() -> None:
    w = waves("gfx950")
    run(w, "s_mov_b64 exec, 1")
    with pytest.raises(UnknownInstructionError, match="tr_b16"):
        run(w, "ds_read_b64_tr_b16 v[4:5], v1")


def memory_of(*arrays):
    memory = GlobalMemory()
    for a in arrays:
        memory.add(Region(a.view(np.uint8), a.ctypes.data))
    return memory


def address(w, index, array, stride):
    at = array.ctypes.data + LANES.astype(np.uint64) * stride
    w.v[index][...], w.v[index + 1][...] = at & 0xFFFFFFFF, at >> 32


def test_global_accesses_are_held_against_the_arguments() -> None:
    x = np.arange(64, dtype=np.uint32)
    w = waves(memory=memory_of(x))
    address(w, 2, x, 4)
    run(w, "global_load_dword v4, v[2:3], off", "v_add_u32_e32 v4, 1, v4", "global_store_dword v[2:3], v4, off")
    assert x.tolist() == list(range(1, 65))
    with pytest.raises(OutOfBoundsError, match="byte 256 of the nearest argument, 256 bytes long"):
        run(w, "global_load_dword v4, v[2:3], off offset:4")
    with pytest.raises(OutOfBoundsError, match="byte -4 of"):
        run(w, "global_store_dword v[2:3], v4, off offset:-4")


def test_a_buffer_reads_zero_beyond_its_descriptor_and_stores_nothing() -> None:
    x = np.arange(1, 65, dtype=np.uint32)
    w = waves(memory=memory_of(x))
    w.s[:, 0:4] = [[x.ctypes.data & 0xFFFFFFFF, x.ctypes.data >> 32, 40, 0x27000]]
    w.v[1][...] = LANES * 4
    run(w, "buffer_load_dword v4, v1, s[0:3], 0 offen", "buffer_store_dword v1, v1, s[0:3], 0 offen offset:8")
    assert w.v[4][0].tolist() == [*range(1, 11), *[0] * 54]
    assert x[:12].tolist() == [1, 2, *(4 * i for i in range(8)), 11, 12]


def test_a_buffer_loads_into_lds_lane_after_lane() -> None:
    x = np.arange(64, dtype=np.uint32)
    w = waves("gfx950", memory=memory_of(x))
    w.s[:, 0:4] = [[x.ctypes.data & 0xFFFFFFFF, x.ctypes.data >> 32, 256, 0x27000]]
    w.v[1][...] = (63 - LANES) * 4
    run(w, "s_mov_b32 m0, 16", "buffer_load_dword v1, s[0:3], 0 offen lds")
    assert w.lds.data.view(np.uint32)[4:68].tolist() == list(range(63, -1, -1))


def test_a_load_into_lds_of_a_wave_that_triton_leaves_out_writes_nothing() -> None:
    x = np.arange(64, dtype=np.uint32)
    w = waves("gfx950", memory=memory_of(x))
    address(w, 2, x, 4)
    run(w, "s_mov_b32 m0, 0x7fffffff", "global_load_lds_dword v[2:3], off")
    assert not w.lds.data.any()


def test_global_memory_loads_into_lds_lane_after_lane() -> None:
    x = np.arange(256, dtype=np.uint32)
    w = waves("gfx950", lds=2048, memory=memory_of(x))
    address(w, 2, x, 16)
    run(w, "s_mov_b32 m0, 32", "global_load_lds_dwordx4 v[2:3], off")
    assert w.lds.data.view(np.uint32)[8:264].reshape(64, 4).tolist() == x.reshape(64, 4).tolist()


def test_a_load_reaches_the_end_of_160_kib_of_lds() -> None:
    x = np.arange(64, dtype=np.uint32)
    w = waves("gfx950", lds=160 << 10, memory=memory_of(x))
    address(w, 2, x, 4)
    run(w, f"s_mov_b32 m0, {(160 << 10) - 256}", "global_load_lds_dword v[2:3], off")
    assert w.lds.data.view(np.uint32)[-64:].tolist() == x.tolist()


@pytest.mark.parametrize(
    ("name", "kind", "want"),
    [("add", np.uint32, 64 + 5), ("smax", np.int32, 5), ("umax", np.uint32, 0xFFFFFFFF), ("add_f32", F32, 64.0)],
)
def test_atomics_of_lanes_at_one_address_all_count(name, kind, want) -> None:
    start = {"add_f32": 0.0, "add": 5, "smax": 5, "umax": 5}[name]
    x = np.array([start], kind)
    w = waves(memory=memory_of(x))
    address(w, 2, x, 0)
    w.v[4][...] = np.array([{"add_f32": F32(1), "add": np.uint32(1)}.get(name, np.uint32(0xFFFFFFFF))]).view(np.uint32)
    run(w, f"global_atomic_{name} v6, v[2:3], v4, off sc0")
    assert x[0] == want
    if name == "add":
        assert w.v[6][0].tolist() == (LANES + 5).tolist()


def test_a_compare_and_swap_takes_place_once() -> None:
    x = np.array([0], np.uint32)
    w = waves(memory=memory_of(x))
    address(w, 2, x, 0)
    w.v[4][...], w.v[5][...] = LANES + 1, 0
    run(w, "global_atomic_cmpswap v6, v[2:3], v[4:5], off sc0")
    assert x[0] == 1
    assert w.v[6][0].tolist() == [0, *[1] * 63]


def packed(matrix, M, K, per_word, code):
    """The registers of an operand [M, K] in the documented layout: lane l holds row l % M."""
    deep = K // (64 // M)
    rows = np.stack([matrix[lane % M, lane // M * deep : (lane // M + 1) * deep] for lane in range(64)])
    return np.ascontiguousarray(code(rows)).view(np.uint32).reshape(64, deep // per_word).T


def product(w, first, M):
    """The result of a matrix instruction, from the registers that begin at `first`."""
    out = np.empty((M, M))
    for r in range(M * M // 64):
        for lane in range(64):
            row = 4 * (lane // 16) + r if M == 16 else 8 * (r // 4) + 4 * (lane // 32) + r % 4
            out[row, lane % M] = floats(w, first + r)[0, lane]
    return out


@pytest.mark.parametrize(
    ("name", "arch", "M", "K", "kind"),
    [
        ("32x32x8_bf16", "gfx942", 32, 8, "bf16"),
        ("32x32x8bf16_1k", "gfx90a", 32, 8, "bf16"),
        ("16x16x16_f16", "gfx942", 16, 16, "f16"),
        ("32x32x2_f32", "gfx942", 32, 2, "f32"),
        ("32x32x16_bf16", "gfx950", 32, 16, "bf16"),
        ("32x32x16_fp8_fp8", "gfx942", 32, 16, "fp8"),
        ("16x16x32_fp8_fp8", "gfx942", 16, 32, "fp8"),
        ("32x32x64_f8f6f4", "gfx950", 32, 64, "fp8"),
        ("16x16x128_f8f6f4", "gfx950", 16, 128, "fp4"),
    ],
)
def test_matrix_instructions_multiply_and_add(name, arch, M, K, kind) -> None:
    rng = np.random.default_rng(0)
    small = {"fp8": FP8[arch == "gfx942"], "fp4": FP4}.get(kind)
    if small:
        codes = rng.integers(0, 1 << small.bits, (2, M, K))
        codes[np.isnan(values(small)[codes])] = 1
        a, b = values(small)[codes].astype(np.float64)
        give = (
            (lambda x: x.astype(np.uint8))
            if kind == "fp8"
            else (lambda x: (x[:, ::2] | x[:, 1::2] << 4).astype(np.uint8))
        )
        held, per_word = codes, {"fp8": 4, "fp4": 8}[kind]
    else:
        a, b = held = rng.integers(-8, 9, (2, M, K)).astype(np.float64)
        give, per_word = {
            "bf16": (lambda x: (x.astype(F32).view(np.uint32) >> 16).astype(np.uint16), 2),
            "f16": (lambda x: x.astype(np.float16), 2),
            "f32": (lambda x: x.astype(F32), 1),
        }[kind]
    w = waves(arch)
    words = [packed(x, M, K, per_word, give) for x in held]
    n = len(words[0])
    for i, word in enumerate(words):
        for r in range(n):
            w.v[32 * i + r][...] = word[r]
    w.v[64].view(F32)[...] = 0.5
    of = f" cbsz:{4 if kind == 'fp4' else 0} blgp:{4 if kind == 'fp4' else 0}" if "f8f6f4" in name else ""
    run(w, f"v_mfma_f32_{name} v[100:{99 + M * M // 64}], v[0:{n - 1}], v[32:{31 + n}], 0.5{of}")
    np.testing.assert_allclose(product(w, 100, M), a @ b.T + 0.5, rtol=1e-6, atol=1e-6)


def test_block_scales_multiply_blocks_of_32() -> None:
    w = waves("gfx950")
    for r in range(4):
        w.v[r][...] = w.v[8 + r][...] = 0x22222222  # 1.0 in fp4
    w.v[20][...] = np.where(LANES < 32, 127, 128)  # the second half of K counts twice
    w.v[21][...] = 127
    run(w, "v_mfma_scale_f32_32x32x64_f8f6f4 v[100:115], v[0:3], v[8:11], 0, v20, v21 op_sel_hi:[0,0,0] cbsz:4 blgp:4")
    assert set(floats(w, 100)[0]) == {32.0 + 64.0}


def test_the_other_flavour_of_fp8_is_a_factor_of_four_in_a_product() -> None:
    results = []
    for arch in ("gfx942", "gfx950"):
        w = waves(arch)
        w.v[0][...] = w.v[1][...] = w.v[4][...] = w.v[5][...] = 0x40404040
        run(w, "v_mfma_f32_32x32x16_fp8_fp8 v[100:115], v[0:1], v[4:5], 0")
        results.append(floats(w, 100)[0, 0])
    assert results == [16.0, 64.0]


def test_several_small_matrices_in_one_instruction_are_refused() -> None:
    with pytest.raises(UnknownInstructionError, match="v_mfma_f32_4x4x4f16"):
        run(waves(), "v_mfma_f32_4x4x4f16 v[0:3], v[4:5], v[6:7], 0")
