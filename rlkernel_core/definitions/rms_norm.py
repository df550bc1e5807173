"""float64 definition of rms_norm (Zhang and Sennrich, arXiv:1910.07467) on the rows that are normalized; gradients."""

from __future__ import annotations

import numpy as np


def rms_norm(s, weight, eps, offset=0.0):
    """y of rows s [N, D]: each over its root mean square, times offset + weight."""
    y = np.zeros(s.shape)
    for i, row in enumerate(s):
        y[i] = row / np.sqrt((row**2).sum() / len(row) + eps) * (offset + weight)
    return y


def rms_norm_gradients(s, weight, eps, offset, g):
    """Gradients of sum(g y) with respect to s and weight, and the sum of the sizes of the terms of each.

    By the quotient rule, element by element: dy_j / ds_k = w'_j (1[j = k] r - s_j s_k r^3 / D).
    """
    (N, D), w = s.shape, offset + weight
    d_s, size_s, d_w, size_w = np.zeros((N, D)), np.zeros((N, D)), np.zeros(D), np.zeros(D)
    for i, row in enumerate(s):
        r = 1 / np.sqrt((row**2).sum() / D + eps)
        terms = g[i] * w * row
        d_s[i] = g[i] * w * r - row * r**3 * terms.sum() / D
        size_s[i] = np.abs(g[i] * w * r) + np.abs(row) * r**3 * np.abs(terms).sum() / D
        d_w += g[i] * row * r
        size_w += np.abs(g[i] * row * r)
    return d_s, size_s, d_w, size_w
