"""float64 definition of linear and its gradients; of each number beside it the sum of the sizes of its terms."""

from __future__ import annotations

import numpy as np


def linear(x, weight, bias=0.0, residual=0.0):
    """y [M, N] of rows x [M, K] and weight [N, K], and sum |x| |weight| + |bias| + |residual|."""
    return x @ weight.T + bias + residual, np.abs(x) @ np.abs(weight).T + np.abs(bias) + np.abs(residual)


def linear_gradients(x, weight, g):
    """Gradients of sum(g y) with respect to x, weight and bias, each with its sum; that of the residual is g."""
    return linear(g, weight.T), linear(g.T, x.T), (g.sum(0), np.abs(g).sum(0))
