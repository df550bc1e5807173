"""The logits of an output head on Hopper, and what becomes of them while they are still fp32 accumulators.

One warp-specialized kernel. A producer warp streams tiles of `hidden` and `weight` through a ring in shared memory with
TMA; two consumer warpgroups, each a partition of its own with 64 rows, run wgmma on the shared weight tile. They may be
apart by up to the depth of the ring, so that the epilogue of one overlaps the matmul of the other. The epilogues:

    STATS   per row and tile of 256 columns: the largest logit y, the sum of exponentials and the same weighted by the
            shifted logit; the chosen id is left out of these and its logit stored by itself
    SAVE    STATS, and fp16(y - tile max) to memory, from which the backward pass makes the gradient of the logits
    GRAD    the gradient of the logits in bf16 to memory, from the row statistics of the forward pass

A row's bits depend on that row alone: the width of a tile and the order of its sums are the same for every N.

    y = acc + bias, capped: c tanh((acc + bias) scale / c)        z in base-2 units = y * s2[row]
    dz = 2^(y s2 - lse2) (ca + cb y), times 1 - (y / c)^2 under a cap

Legend: N rows of this launch · V vocabulary · D hidden · BM rows of a consumer · BN columns · BK of D per step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Triton 3.6 has the first pair of names, later releases the second.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

STATS, SAVE, GRAD = 0, 1, 2
FAR = gl.constexpr(-1e30)  # a logit that takes no part: its exponential is exactly 0


@gluon.jit
def _tile_at(i, num_m, num_n, GROUP_M: gl.constexpr):
    """Tile coordinates (row, column). GROUP_M row tiles share each tile of the weight while it is in L2."""
    per_group = GROUP_M * num_n
    first = i // per_group * GROUP_M
    height = gl.minimum(num_m - first, GROUP_M)
    r = i % per_group
    return first + r % height, r // height


@gluon.jit
def _row_tiles(count, first_row, N, ROWS: gl.constexpr, COUNTED: gl.constexpr):
    """Row tiles of this launch that hold a row to be worked on: all, or those below a count that lies on the device."""
    live = N
    if COUNTED:
        live = gl.minimum(gl.maximum(gl.load(count) - first_row, 0), N)
    return gl.cdiv(live, ROWS)


@gluon.jit
def _produce(
    x_desc, w_desc, a_bufs, b_bufs, full, empty, count, first_row, N, k_tiles, num_n,
    NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    num_m = _row_tiles(count, first_row, N, NC * BM, COUNTED)
    stage, phase = 0, 1
    for i in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        tm, tn = _tile_at(i, num_m, num_n, GROUP_M)
        for k in range(k_tiles):
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, (NC * BM + BN) * BK * 2)
            load_tile(w_desc, [tn * BN, k * BK], bar, b_bufs.index(stage))
            for c in gl.static_range(NC):
                load_tile(x_desc, [(tm * NC + c) * BM, k * BK], bar, a_bufs.index(stage * NC + c))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _write(desc, buf, x, row, col, BM: gl.constexpr, BN: gl.constexpr):
    """Two halves through one staging buffer."""
    lo, hi = x.reshape([BM, 2, BN // 2]).permute([0, 2, 1]).split()
    for i in gl.static_range(2):
        tma.store_wait(0)
        buf.store(lo if i == 0 else hi)
        fence_async_shared()
        store_tile(desc, [row, col + i * (BN // 2)], buf)


@gluon.jit
def _consume(
    a_bufs, b_bufs, full, empty, out_bufs, out_desc, target, bias, row_scale, tops, sums, chosen, coef, count,
    first_row, N, V, stride, cap, cap_in, k_tiles, num_n,
    ME: gl.constexpr, NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, MODE: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    num_m = _row_tiles(count, first_row, N, NC * BM, COUNTED)
    stage, phase = 0, 0
    for i in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        tm, tn = _tile_at(i, num_m, num_n, GROUP_M)
        mbarrier.wait(full.index(stage), phase)
        token = warpgroup_mma(
            a_bufs.index(stage * NC + ME), b_bufs.index(stage).permute((1, 0)),
            gl.zeros([BM, BN], gl.float32, mma), use_acc=False, is_async=True,
        )  # fmt: skip
        acc = warpgroup_mma_wait(1, deps=[token])
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        for _ in range(1, k_tiles):
            mbarrier.wait(full.index(stage), phase)
            token = warpgroup_mma(
                a_bufs.index(stage * NC + ME), b_bufs.index(stage).permute((1, 0)), acc, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=[token])  # the step before this one is done: free its buffers
            mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1)

        row0 = (tm * NC + ME) * BM
        col0 = tn * BN
        rows = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, mma))
        cols = gl.arange(0, BN, layout=gl.SliceLayout(0, mma))
        live = rows < N
        s2 = gl.load(row_scale + rows, mask=live, other=0.0)
        if BIAS:
            acc += gl.load(bias + col0 + cols, mask=col0 + cols < V, other=0.0)[None, :]
            acc = gl.where(acc == -float("inf"), FAR, acc)  # a forbidden id
        if CAP:
            capped = cap * (1.0 - 2.0 / (1.0 + gl.exp2(acc * cap_in)))  # tanh from one exponential
            acc = gl.where(acc <= FAR, FAR, capped) if BIAS else capped
        if MODE == 2:  # the chosen id's own entry is written afterwards
            lse2 = gl.load(coef + rows, mask=live, other=0.0)
            ca = gl.load(coef + stride + rows, mask=live, other=0.0)
            cb = gl.load(coef + 2 * stride + rows, mask=live, other=0.0)
            dz = gl.exp2(acc * s2[:, None] - lse2[:, None]) * (acc * cb[:, None] + ca[:, None])
            if CAP:
                bend = 1.0 - acc * acc * (1.0 / (cap * cap))
                dz *= gl.where(acc <= FAR, 0.0, bend) if BIAS else bend
            _write(out_desc, out_bufs.index(ME), dz.to(gl.bfloat16), row0, col0, BM, BN)
        else:
            t = gl.load(target + rows, mask=live, other=-1) - col0
            inside = (t >= 0) & (t < BN)
            if gl.max(inside.to(gl.int32), 0) > 0:
                is_t = cols[None, :] == t[:, None]
                gl.store(chosen + rows, gl.sum(gl.where(is_t, acc, 0.0), 1), mask=inside & live)
                acc = gl.where(is_t, FAR, acc)
            if col0 + BN > V:
                acc = gl.where((col0 + cols < V)[None, :], acc, FAR)
            m = gl.max(acc, 1)
            # Subtract the top before scaling: if all ids hold one large number, y s - m s is a rounding error.
            acc -= m[:, None]
            d = acc * s2[:, None]
            e = gl.exp2(d)
            gl.store(tops + tn.to(gl.int64) * stride + rows, m, mask=live)
            at = sums + tn.to(gl.int64) * (2 * N) + rows
            gl.store(at, gl.sum(e, 1), mask=live)
            gl.store(at + N, gl.sum(e * d, 1), mask=live)
            if MODE == 1:
                _write(out_desc, out_bufs.index(ME), acc.to(gl.float16), row0, col0, BM, BN)
    if MODE != 0:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["N", "first_row", "stride"])
def logits_kernel(
    x_desc, w_desc, out_desc, target, bias, row_scale, tops, sums, chosen, coef, count,
    first_row, N, V, stride, cap, cap_in, k_tiles,
    NC: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, MODE: gl.constexpr, BIAS: gl.constexpr, CAP: gl.constexpr, COUNTED: gl.constexpr,
):  # fmt: skip
    """Grid: one program a multiprocessor. Unused pointers may hold anything."""
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * NC, BM, BK], x_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [NC, BM, BN // 2 if MODE != 0 else BK], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    fence_async_shared()
    num_n = gl.cdiv(V, BN)
    gl.warp_specialize(
        [
            (_consume, (a_bufs, b_bufs, full, empty, out_bufs, out_desc, target, bias, row_scale, tops, sums, chosen,
                        coef, count, first_row, N, V, stride, cap, cap_in, k_tiles, num_n, gl.constexpr(0), NC, BM,
                        BN, STAGES, GROUP_M, MODE, BIAS, CAP, COUNTED)),
            (_consume, (a_bufs, b_bufs, full, empty, out_bufs, out_desc, target, bias, row_scale, tops, sums, chosen,
                        coef, count, first_row, N, V, stride, cap, cap_in, k_tiles, num_n, gl.constexpr(1), NC, BM,
                        BN, STAGES, GROUP_M, MODE, BIAS, CAP, COUNTED)),
            (_produce, (x_desc, w_desc, a_bufs, b_bufs, full, empty, count, first_row, N, k_tiles, num_n, NC, BM, BN,
                        BK, STAGES, GROUP_M, COUNTED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
