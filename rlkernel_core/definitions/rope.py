"""float64 definition of rope (Su et al., arXiv:2104.09864) with a norm of each head before; gradients.

A pair (a, b) is the complex number a + ib, and to rotate it is to multiply it with c + is.
"""

from __future__ import annotations

import numpy as np

from rlkernel_core.definitions.rms_norm import rms_norm, rms_norm_gradients


def rope(x, positions, table, interleaved=False, weight=None, eps=0.0, offset=0.0):
    """x [N, H, D] rotated by positions [N], and the sum of the sizes of the terms of each number, both [N, H, D]."""
    y, size = np.zeros(x.shape), np.zeros(x.shape)
    for n, heads in enumerate(x):
        normal = heads if weight is None else rms_norm(heads, weight, eps, offset)
        y[n], size[n] = _turned(normal, positions[n], table, interleaved, 1.0)
    return y, size


def rope_gradients(x, positions, table, interleaved, weight, eps, offset, g):
    """Gradients of sum(g y) with respect to x and the weight, and the sum of the sizes of the terms of each.

    The transpose of a rotation is the one back, g (c - is); tokens at positions beyond the table have none.
    """
    d_x, size_x = np.zeros(x.shape), np.zeros(x.shape)
    d_w, size_w = np.zeros(x.shape[-1]), np.zeros(x.shape[-1])
    for n, heads in enumerate(x):
        if not 0 <= positions[n] < len(table):
            continue
        back, size = _turned(g[n], positions[n], table, interleaved, -1.0)
        if weight is None:
            d_x[n], size_x[n] = back, size
            continue
        d_x[n], _, d, _ = rms_norm_gradients(heads, weight, eps, offset, back)
        _, size_x[n], _, s = rms_norm_gradients(heads, weight, eps, offset, size)
        d_w, size_w = d_w + d, size_w + s
    return d_x, size_x, d_w, size_w


def _turned(heads, position, table, interleaved, way):
    """Heads [H, D] of one token, forward (way = 1) or back (-1); NaN where the table has no such row."""
    if not 0 <= position < len(table):
        return np.full(heads.shape, np.nan), np.full(heads.shape, np.nan)
    half = table.shape[1] // 2
    cos, sin = table[position, :half], way * table[position, half:]
    a, b = (np.arange(half) * 2, np.arange(half) * 2 + 1) if interleaved else (np.arange(half), np.arange(half) + half)
    z = (heads[:, a] + 1j * heads[:, b]) * (cos + 1j * sin)
    y, size = heads.copy(), np.abs(heads)
    y[:, a], y[:, b] = z.real, z.imag
    size[:, a] = np.abs(heads[:, a] * cos) + np.abs(heads[:, b] * sin)
    size[:, b] = np.abs(heads[:, b] * cos) + np.abs(heads[:, a] * sin)
    return y, size
