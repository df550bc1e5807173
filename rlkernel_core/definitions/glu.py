"""float64 definition of glu and its gradient (arXiv:2002.05202, arXiv:1606.08415)."""

from __future__ import annotations

import math

import numpy as np

erfc = np.vectorize(math.erfc, otypes=[np.float64])


def activation(g, name):
    """The activation of an array and its derivative."""
    if name == "gelu":
        cdf = 0.5 * erfc(-g / math.sqrt(2))
        return g * cdf, cdf + g * np.exp(-0.5 * g**2) / math.sqrt(2 * math.pi)
    if name == "silu":
        cdf, inner = _sigmoid(g), np.ones(g.shape)
    else:  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
        c = 2 * math.sqrt(2 / math.pi)
        cdf, inner = _sigmoid(c * (g + 0.044715 * g**3)), c * (1 + 3 * 0.044715 * g**2)
    return g * cdf, cdf + g * cdf * (1 - cdf) * inner


def _sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def glu(x, name):
    """y of x [..., 2 D]."""
    gate, up = np.split(x, 2, -1)
    return activation(gate, name)[0] * up


def glu_gradient(x, name, g):
    """Gradient of sum(g y) with respect to x."""
    gate, up = np.split(x, 2, -1)
    value, derivative = activation(gate, name)
    return np.concatenate([g * up * derivative, g * value], -1)
