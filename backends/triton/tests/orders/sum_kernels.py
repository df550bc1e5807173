"""Toy kernels whose orders of sums are known, and how they are launched."""

import numpy as np
import torch
import triton
import triton.language as tl

from rlkernel_triton.orders.expressions import leaf


@triton.jit(do_not_specialize=["N"])
def row_sum(x, out, N, V, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, V, BLOCK):
        total += tl.load(x + row * V + first + at, mask=first + at < V, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows"])
def renamed(source, to, rows, columns, TILE: tl.constexpr):
    i, lane = tl.program_id(0), tl.arange(0, TILE)
    so_far = tl.zeros([TILE], tl.float32)
    for start in range(0, columns, TILE):
        so_far += tl.load(source + i * columns + start + lane, mask=start + lane < columns, other=0.0)
    tl.store(to + i, tl.sum(so_far, 0))


@triton.jit(do_not_specialize=["N"])
def sum_by_batch(x, out, N, V, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    step = BLOCK
    if N > 4:
        step = 2 * BLOCK
    for half in range(0, step, BLOCK):
        for first in range(half, V, step):
            total += tl.load(x + row * V + first + at, mask=first + at < V, other=0.0)
    tl.store(out + row, tl.sum(total, 0))


@triton.jit(do_not_specialize=["N"])
def sum_with_neighbor(x, out, N, V, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    other = (row + 1) % N
    y = tl.load(x + row * V + at, mask=at < V, other=0.0) + 0.0 * tl.load(x + other * V + at, mask=at < V, other=0.0)
    tl.store(out + row, tl.sum(y, 0))


@triton.jit(do_not_specialize=["N"])
def sum_until_negative(x, out, N, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i, y, total = 0, tl.load(x + row * V), 0.0
    while (i < V) & (y > 0.0):
        total += y
        i += 1
        y = tl.load(x + row * V + i, mask=i < V, other=-1.0)
    tl.store(out + row, total)


@triton.jit(do_not_specialize=["N"])
def sum_by_arrival(x, out, N, V, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.atomic_add(out + row + at * 0, tl.load(x + row * V + at, mask=at < V, other=0.0))


@triton.jit
def products(a, b, out, K: tl.constexpr, M: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + m[None, :] * K + k[:, None])
    tl.store(out + m[:, None] * M + m[None, :], tl.dot(x, y))


def sums(launcher, kernel, x, *, block=64, warps=1, row=None):
    """[N] sums of the rows of x and their hashes [N]; row: the one whose numbers are named by their place alone."""
    N, V = x.shape
    names = leaf("x", np.broadcast_to(np.arange(V), (N, V)), 2)
    if row is not None:
        others = leaf("x of other rows", np.arange(N * V).reshape(N, V), 2)
        names = np.where((np.arange(N) == row)[:, None, None], names, others)
    launcher.memory.name(x, names)
    out = torch.zeros(N)
    fixed = {kernel.arg_names[2]: N, kernel.arg_names[3]: V, kernel.arg_names[4]: block}
    launcher.bind(kernel, num_warps=warps, **fixed)((N, 1, 1), x, out)
    return out, launcher.memory.hashes(out)[:, 0]
