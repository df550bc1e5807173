"""float64 definition of grouped_linear and its gradients; beside each number the sum of the sizes of its terms."""

from __future__ import annotations

import numpy as np

from rlkernel_core.definitions.linear import linear, linear_gradients


def spans(ends, T):
    """Rows of each expert, as slices: an end below the one before it counts as that one, one beyond T as T."""
    last = np.maximum.accumulate(np.clip(ends, 0, T))
    return [slice(int(a), int(b)) for a, b in zip((0, *last[:-1]), last, strict=True)]


def grouped_linear(x, weight, ends, bias=None):
    """y [T, N] of rows x [T, K] and weight [E, N, K], and the sums of the sizes of its terms."""
    y, reach = np.zeros((2, len(x), weight.shape[1]))
    for e, rows in enumerate(spans(ends, len(x))):
        y[rows], reach[rows] = linear(x[rows], weight[e], 0.0 if bias is None else bias[e])
    return y, reach


def grouped_linear_gradients(x, weight, ends, g):
    """Gradients of sum(g y) with respect to x, weight and bias, each with its sum."""
    of_x, of_weight, of_bias = np.zeros((2, *x.shape)), np.zeros((2, *weight.shape)), np.zeros((2, *weight.shape[:2]))
    for e, rows in enumerate(spans(ends, len(x))):
        of_x[:, rows], of_weight[:, e], of_bias[:, e] = linear_gradients(x[rows], weight[e], g[rows])
    return of_x, of_weight, of_bias
