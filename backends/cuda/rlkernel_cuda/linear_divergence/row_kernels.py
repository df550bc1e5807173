"""Around compare.cu: merging the tiles of a row, and the gradient of its logits from what was saved of each tile.

A KL is that of the masses of the tiles, and for each tile its mass times its own KL (chain rule). With A and B the
masses of a tile, a and b the laws within it, KL the row's and 1/T the student's:

    reverse_kl   dz = A a (log(a / b) + log(A / B) - KL) / T
    forward_kl   dz = ((A - B) a + B (a - b)) / T

both of which keep their digits where the two sides nearly agree.

Legend: N rows · V vocabulary · tiles of BN columns.
"""

import triton
import triton.language as tl

from rlkernel_triton.common.arithmetic import LN2
from rlkernel_triton.divergence.kernels import log_total
from rlkernel_triton.divergence.running_kl import share
from rlkernel_triton.divergence.terms import term_and_derivative

UNSHIFT = tl.constexpr(1 / 16384)  # compare.cu keeps laws times 2^14
NONE = tl.constexpr(float("-inf"))


@triton.jit
def tile_masses(top, total, best, scale):
    """Masses of tiles where `best` is 1: 0 in one without an id that takes part."""
    return tl.where(top == NONE, 0.0, total * tl.exp2((top - best[None, :]) * scale[None, :]))


@triton.jit
def add_masses(best, sums, top, total, scale):
    """(best, sums) of a row with some tiles more."""
    new = tl.maximum(best, tl.max(top, 0))
    down = tl.where(best == NONE, 0.0, tl.exp2((best - new) * scale))
    return new, sums * down + tl.sum(tile_masses(top, total, new, scale), 0)


@triton.jit
def log_masses(top, total, best, log, scale):
    """Logarithms of base 2 of the masses of tiles, where those of the row sum to 1."""
    return tl.where(top == NONE, NONE, (top - best[None, :]) * scale[None, :] + tl.log2(total) - log[None, :])


@triton.jit(do_not_specialize=["N"])
def merge_tiles_kernel(
    sums,  # [tiles, 5, N] as compare.cu wrote them; with SAVE [tiles, 2, N] of it become coefficients of the gradient
    scale,  # [N] student's logits times this are in base-2 units
    t_scale,  # [N] the teacher's
    mask,  # [N] where HAS_MASK: rows that count
    values,  # [N] divergences
    rows_back,  # [2, N] where SAVE: the student's 1/T, NaN where there is no gradient, and the KL
    N,
    tiles,
    HAS_MASK: tl.constexpr,
    KIND: tl.constexpr,
    SAVE: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """The divergence of each row. Grid: rows over ROWS. A row's tiles are merged in their order, whatever N is."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < N
    s2, t2 = tl.load(scale + row, mask=live, other=1.0), tl.load(t_scale + row, mask=live, other=1.0)
    best = tl.full([ROWS], NONE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    t_best = tl.full([ROWS], NONE, tl.float32)
    t_total = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        ok = (tile < tiles)[:, None] & live[None, :]
        at = sums + tile.to(tl.int64)[:, None] * (5 * N) + row[None, :]
        m, s = tl.load(at, mask=ok, other=NONE), tl.load(at + N, mask=ok, other=0.0)
        best, total = add_masses(best, total, m, s, s2)
        m, s = tl.load(at + 2 * N, mask=ok, other=NONE), tl.load(at + 3 * N, mask=ok, other=0.0)
        t_best, t_total = add_masses(t_best, t_total, m, s, t2)
    log, t_log = log_total(best, total), log_total(t_best, t_total)
    value = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS], tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        ok = (tile < tiles)[:, None] & live[None, :]
        at = sums + tile.to(tl.int64)[:, None] * (5 * N) + row[None, :]
        m, s = tl.load(at, mask=ok, other=NONE), tl.load(at + N, mask=ok, other=0.0)
        log_s = log_masses(m, s, best, log, s2)
        m, s = tl.load(at + 2 * N, mask=ok, other=NONE), tl.load(at + 3 * N, mask=ok, other=0.0)
        log_t = log_masses(m, s, t_best, t_log, t2)
        one, u = term_and_derivative(log_s, log_t, 0.0, 0.0, 0.0, KIND)
        mass, t_mass = tl.exp2(log_s), tl.exp2(log_t)
        within = share(mass if KIND == "reverse_kl" else t_mass, tl.load(at + 4 * N, mask=ok, other=0.0))
        value += tl.sum(one + within, 0)
        mean += tl.sum(u + within, 0)
        if SAVE:
            if KIND == "reverse_kl":
                tl.store(at, mass, mask=ok)
                tl.store(at + N, tl.where(log_s == NONE, 0.0, (log_s - log_t) * LN2), mask=ok)
            else:
                tl.store(at, mass - t_mass, mask=ok)
                tl.store(at + N, t_mass, mask=ok)
    if SAVE:
        tl.store(rows_back + row, tl.where(value < float("inf"), s2 * LN2, float("nan")), mask=live)
        tl.store(rows_back + N + row, mean, mask=live)
    if HAS_MASK:
        value = tl.where(tl.load(mask + row, mask=live, other=0) != 0, value, 0.0)
    tl.store(values + row, value, mask=live)


@triton.jit(do_not_specialize=["N"])
def gradient_kernel(
    dz,  # [n, pitch] fp16(2^14 a), overwritten by the gradient in bf16
    kept,  # [n, pitch] fp16, the other number that compare.cu kept of each logit
    sums,  # [tiles, 5, N], as `merge_tiles_kernel` left it
    rows_back,  # [2, N]
    mask,  # [N] where HAS_MASK
    g,  # [N] fp32 upstream gradient
    N, V, pitch,
    HAS_MASK: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The gradient of the logits. Grid: rows, tiles over TILES LOOP."""
    row = tl.program_id(0)
    counts = True
    if HAS_MASK:
        counts = tl.load(mask + row) != 0
    up = tl.load(g + row) * tl.load(rows_back + row) * UNSHIFT
    mean = tl.load(rows_back + N + row)
    for i in range(LOOP):
        tile = (tl.program_id(1) * LOOP + i) * TILES + tl.arange(0, TILES)
        here = tile * BN < V
        at = sums + tile.to(tl.int64) * (5 * N) + row
        first, second = tl.load(at, mask=here, other=0.0)[:, None], tl.load(at + N, mask=here, other=0.0)[:, None]
        column = tile[:, None] * BN + tl.arange(0, BN)[None, :]
        inside = column < V
        offset = row.to(tl.int64) * pitch + column
        a = tl.load(dz + offset, mask=inside, other=0.0).to(tl.float16, bitcast=True).to(tl.float32)
        b = tl.load(kept + offset, mask=inside, other=0.0).to(tl.float32)
        out = first * a * (b + (second - mean)) if KIND == "reverse_kl" else first * a + second * b
        out *= up
        tl.store(dz + offset, tl.where(counts, out, 0.0).to(tl.bfloat16), mask=inside)
