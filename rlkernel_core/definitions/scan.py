"""float64 definition of the affine suffix scan (Blelloch, CMU-CS-90-190, section 1.4) and of its adjoint."""

from __future__ import annotations

import numpy as np


def scan_row(a, b, m, init=0.0, exclusive=False, carry=False):
    """y_t = a_t y + b_t from the right over the valid positions; the y of every position, and the first one's."""
    y, out = float(init), np.zeros(len(b))
    for t in range(len(b) - 1, -1, -1):
        before = y
        if m[t]:
            y = a[t] * y + b[t]
            out[t] = before if exclusive else y
        elif carry:
            out[t] = y
    return out, y


def adjoint_row(a, b, m, init, g_y, g_carry):
    """Gradients of sum(g_y y) + g_carry carry with respect to b, a and init."""
    at = [t for t in range(len(b)) if m[t]]
    y, _ = scan_row(a, b, m, init)
    d_a, d_b, flow = np.zeros(len(b)), np.zeros(len(b)), float(g_carry)
    for i, t in enumerate(at):
        d_b[t] = flow + g_y[t]
        d_a[t] = d_b[t] * (y[at[i + 1]] if i + 1 < len(at) else init)
        flow = a[t] * d_b[t]
    return d_b, d_a, flow
